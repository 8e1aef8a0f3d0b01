"""Flags for stages and tensor parallelism, checked before anything is measured."""

import argparse
from pathlib import Path

from osdp.plan.dims import ParallelDims, degrees
from osdp.plan.schedule import SCHEDULES, make_schedule
from osdp.plan.schedules import SCHEDULE_KINDS

#: Microbatches for each rank of a pipeline where no flag says how many.
_MICROBATCHES = 4


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    stages = parser.add_argument_group("stages and tensor parallelism, of OSDP only")
    stages.add_argument("--pp", type=int, help="processes of a pipeline, each with stages of the model")
    stages.add_argument("--dp", type=int, help="data-parallel processes of a stage; follows from the others")
    stages.add_argument("--tp", type=int, help="processes that compute each layer together")
    stages.add_argument("--schedule", choices=SCHEDULES, help="order of the stages; the fastest by default")
    stages.add_argument(
        "--microbatches", type=int, help=f"of a step, --batch samples each ({_MICROBATCHES} x pp)"
    )


def stages_of(options: argparse.Namespace, world_size: int) -> ParallelDims | None:
    """The degrees that the flags ask for, also set in ``options``; ``None`` for data parallelism alone.

    Raises:
        ValueError: Flags do not fit each other or the number of processes; lists everything wrong.
    """
    layout = degrees(world_size, options.pp, options.dp, options.tp)
    if layout.pp == layout.tp == 1:
        idle = [f"--{name}" for name in ("schedule", "microbatches") if getattr(options, name) is not None]
        if idle:
            raise ValueError(f"{' and '.join(idle)} would change nothing without --pp or --tp")
        return None
    if options.microbatches is None:
        options.microbatches = _MICROBATCHES * layout.pp if layout.pp > 1 else 1
    faults = [*_misfits(options, layout), *_idle(options, layout)]
    if faults:
        raise ValueError("; ".join(faults))
    return layout


def _misfits(options: argparse.Namespace, layout: ParallelDims) -> list[str]:
    """Numbers that do not fit each other."""
    found = []
    if options.heads % layout.tp:
        found.append(f"--tp {layout.tp} does not divide --heads {options.heads}")
    if options.microbatches < 1:
        found.append(f"--microbatches {options.microbatches} is less than 1")
    if options.layers < (stages := _num_stages(options.schedule, layout.pp)):
        found.append(f"--layers {options.layers} are fewer than the {stages} stages")
    samples = options.batch * max(options.microbatches, 1) * layout.dp
    baselines = [name for name in options.strategies if name != "OSDP"]
    if baselines and samples % layout.world_size:
        found.append(
            f"{' and '.join(baselines)} cannot share the {samples} samples of a step evenly among "
            f"{layout.world_size} processes"
        )
    return found


def _idle(options: argparse.Namespace, layout: ParallelDims) -> list[str]:
    """What stages cannot do."""
    found = []
    if "OSDP" not in options.strategies:
        found.append(f"{' and '.join(options.strategies)} have no stages: add OSDP to --strategies")
    if options.schedule is not None and layout.pp == 1:
        found.append(f"--schedule {options.schedule} orders a pipeline: pass --pp, too")
    if options.schedule and SCHEDULE_KINDS[options.schedule].splits_backward and layout.dp * layout.tp > 1:
        found.append(
            f"--schedule {options.schedule} needs dp=1 (here {layout.dp}) and tp=1 (here {layout.tp})"
        )
    if options.groups != "none":
        found.append("--groups is for data parallelism alone")
    if options.memory_fraction is not None:
        found.append("--memory-fraction is for data parallelism alone; stages take --memory-limit")
    if options.plan is not None and not Path(options.plan).is_file():
        found.append(f"--plan: there is no file {options.plan}")
    return found


def _num_stages(schedule: str | None, pp: int) -> int:
    """Stages of a schedule; of one for each rank if it is to be chosen."""
    return make_schedule(schedule, pp, 1).num_stages if schedule else pp
