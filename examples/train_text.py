"""Train a byte-level GPT-2, OPT or BERT on real text under OSDP, FSDP2 or DDP, and compare them in one run.

Started by torchrun, which demo.sh and the scripts named after a model do::

    torchrun --standalone --nproc-per-node 2 -m examples.train_text --strategies OSDP FSDP2 DDP
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from examples import run_report, stage_options, text_model
from examples.text_data import Corpus
from examples.text_model import Size, Wrap
from examples.training_run import Part, Run, Settings, train
from osdp.integrations.paper_options import GROUP_TYPES, gen_fsdp_args
from osdp.plan.dims import ParallelDims
from osdp.text import parse_bytes

if TYPE_CHECKING:
    from examples.run_planning import Planning

STRATEGIES = ("OSDP", "FSDP2", "DDP")
NUMBERS = {"layers": 6, "hidden": 256, "heads": 8, "seq": 128, "batch": 4, "steps": 30, "seed": 0}
FRACTION = 0.5


def main() -> None:
    """Plan where OSDP is asked for, train with every strategy, report what came out."""
    options = parse()
    layout = layout_of(options)
    part = start()
    corpus = read_corpus(options)
    settings = settings_of(options, part.world_size, layout)
    planning = plan_for(options, settings, part, layout)
    runs = {
        name: train(name, wrap_of(name, planning, part), settings, corpus, part_of(name, part, layout))
        for name in options.strategies
    }
    reference = single_process(settings, corpus, part) if options.reference else None
    if part.rank == 0:
        limit = planning.plan.memory_limit if planning else options.memory_limit
        results = run_report.Results(settings, corpus, planning, runs, reference, limit)
        print(run_report.text(results))
        if options.json:
            run_report.save(results, options.json)
    leave()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["OSDP"])
    parser.add_argument("--reference", action="store_true", help="train in a single process as well")
    parser.add_argument("--data", type=Path, help="file or folder of text; default: Python's own library")
    parser.add_argument("--max-bytes", type=parse_bytes, default="8MiB", help="of text to read (%(default)s)")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    parser.add_argument("--family", choices=text_model.FAMILIES, default="gpt2", help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=5e-4, help="highest learning rate (%(default)s)")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--memory-limit", type=parse_bytes, help="per device, for example 8GiB")
    limit.add_argument(
        "--memory-fraction",
        type=float,
        help=f"limit as a way from the predicted peak of all sharded to that of all replicated ({FRACTION})",
    )
    parser.add_argument(
        "--groups", choices=GROUP_TYPES, default="none", help="force OSDP to use groups so (%(default)s)"
    )
    parser.add_argument("--group-size", type=int, help="processes of a group; by default those of a machine")
    stage_options.add_flags(parser)
    parser.add_argument("--plan", type=Path, help="use this plan instead of planning")
    parser.add_argument("--save-plan", type=Path, help="write the plan here")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


def layout_of(options: argparse.Namespace) -> ParallelDims | None:
    """The degrees of stages that the flags ask for, if any; mistaken flags end the program with one line."""
    if "RANK" not in os.environ:
        raise SystemExit("start this with torchrun: " + (__doc__ or "").strip().split("\n")[-1].strip())
    try:
        return stage_options.stages_of(options, int(os.environ["WORLD_SIZE"]))
    except ValueError as error:
        # Every process says it: torchrun ends the others once one is gone, be it the one that speaks or not.
        raise SystemExit(f"error: {error}") from error


def start() -> Part:
    """Join the process group that torchrun set up: nccl where every process has a GPU, else gloo."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    return Part(dist.get_rank(), dist.get_world_size(), device)


def leave() -> None:
    """Leave the process group, if it is still there, once all processes are done with it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def end() -> None:
    """End the process without taking the interpreter down.

    Threads of gloo outlive their process group and may hold the tensors of its last collective: when the
    interpreter ends meanwhile, the process is aborted, about once in forty times on busy machines
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def read_corpus(options: argparse.Namespace) -> Corpus:
    """The text; a mistaken ``--data`` ends the program with one line."""
    try:
        return Corpus.read(options.data, options.max_bytes)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: --data: {error}") from error


def settings_of(options: argparse.Namespace, world_size: int, layout: ParallelDims | None) -> Settings:
    """The settings that the flags describe.

    ``--batch`` counts samples per process; in stages those of a microbatch on one data-parallel process.
    """
    size = Size(options.layers, options.hidden, options.heads, options.seq, options.family)
    shares = layout.dp * options.microbatches if layout else world_size
    return Settings(size, options.batch * shares, options.steps, options.lr, options.seed)


def part_of(name: str, part: Part, layout: ParallelDims | None) -> Part:
    """``part``, in stages if the strategy called ``name`` makes some."""
    return replace(part, layout=layout) if name == "OSDP" else part


def plan_for(
    options: argparse.Namespace, settings: Settings, part: Part, layout: ParallelDims | None
) -> "Planning | None":
    """The planning, printed and saved; ``None`` if nothing asks for it."""
    if "OSDP" not in options.strategies:
        return None
    # Here, so that a baseline is started and timed without the planner.
    from examples.run_planning import make_planning, make_stage_planning

    if layout:
        planning = make_stage_planning(
            settings, layout, options.schedule, options.microbatches, options.memory_limit, options.plan
        )
    else:
        planning = make_planning(
            settings,
            init_device_mesh(part.device.type, (part.world_size,)),
            options.memory_limit,
            FRACTION if options.memory_fraction is None else options.memory_fraction,
            options.plan,
            groups_of(options, part.world_size),
        )
    if part.rank == 0:
        print(planning.plan, flush=True)
        if options.save_plan:
            planning.plan.save(options.save_plan)
    return planning


def groups_of(options: argparse.Namespace, world_size: int) -> dict[str, Any]:
    """What ``--groups`` and ``--group-size`` mean to OSDP."""
    if options.groups == "none":
        return {}
    size = int(os.environ["LOCAL_WORLD_SIZE"]) if options.group_size is None else options.group_size
    if size < 1 or world_size % size:
        raise SystemExit(f"error: --group-size: groups of {size} do not divide {world_size} processes")
    args = gen_fsdp_args(world_size // size, size, options.groups, options.family)
    if "group_sizes" not in args and os.environ["RANK"] == "0":
        print(
            f"one group of {size} of {world_size} processes: no groups; --group-size makes some", flush=True
        )
    return args


def wrap_of(name: str, planning: "Planning | None", part: Part) -> Wrap:
    """How to spread a model under the strategy called ``name``."""
    if name == "OSDP" and planning is not None:
        return planning.osdp()
    if name == "DDP":
        return text_model.ddp(part.device)
    return text_model.fsdp2(init_device_mesh(part.device.type, (part.world_size,)))


def single_process(settings: Settings, corpus: Corpus, part: Part) -> Run | None:
    """The same training on the whole global batch in the first process, while the others wait."""
    run = None
    if part.rank == 0:
        if part.device.type == "cpu":
            # The cores of the waiting processes are free.
            torch.set_num_threads(torch.get_num_threads() * part.world_size)
        run = train(
            "single process", text_model.single(part.device), settings, corpus, Part(0, 1, part.device)
        )
    dist.barrier()
    return run


if __name__ == "__main__":
    main()
    end()
