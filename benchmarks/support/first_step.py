"""Seconds from a plain model to the end of its first step, in processes that have done nothing before.

Under plain FSDP2, and under OSDP as it starts: from an estimate, or from measurements, with an empty cache.
"""

import time
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.support.baselines import fsdp2, make_optimizer, rank_batches, train_step
from benchmarks.support.candidates import live_mesh
from benchmarks.support.harness import Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.models import CASES, Case, gpt2
from osdp import OSDP, Training

RANKS = 2
#: GPT-2 of 124 million parameters, on sequences short enough for a core.
LARGE = gpt2("gpt2-124m, 128 tokens", layers=12, width=768, heads=12, length=128, vocab=50257)
#: Ten others, of all kinds.
OTHERS = (
    "gpt2-deep", "gpt2-wide", "llama-32k", "bert-128", "mlp-table", "vit-stem", "convnext", "resnet", "moe",
    "unet",
)  # fmt: skip
STARTS = ("fsdp2", "estimated", "measured")
SAMPLES = 1
TIMEOUT = 300


def case_of(name: str) -> Case:
    """The model of this name."""
    return LARGE if name == LARGE.name else CASES[name]


def start(rank: int, world_size: int, *, case: str, how: str, samples: int) -> dict[str, float]:
    """Worker: seconds until the model is wrapped, and until its first step has ended, from then on."""
    chosen, training = case_of(case), Training(local_batch=samples)
    model, batches = chosen.model(), rank_batches(chosen, samples, rank, world_size, cycle=1)
    batch = batches(0)
    dist.barrier()
    begin = time.perf_counter()
    if how == "fsdp2":
        wrapped = fsdp2(model, chosen, live_mesh())
    else:
        wrapped = OSDP(model, batch, "1TiB", training=training, start=how, cache_dir=None)
    done = time.perf_counter()
    train_step(wrapped, make_optimizer(wrapped.parameters(), training), batches)(0)
    dist.barrier()
    return {"wrap": done - begin, "step": time.perf_counter() - done}


def name_of(case: str) -> str:
    """The name of the row of a model."""
    return f"first step, {case}"


def is_one(row: Row) -> bool:
    """Whether ``row`` is one of :func:`row_of`."""
    return str(row["name"]).startswith(name_of(""))


def row_of(case: str, *, repeats: int, samples: int = SAMPLES) -> Row:
    """The first steps of one model, each start in turn ``repeats`` times; medians, and all that was seen."""
    seen: dict[str, list[dict[str, float]]] = {how: [] for how in STARTS}
    try:
        for _ in range(repeats):
            for how, found in seen.items():
                arguments: dict[str, Any] = {"case": case, "how": how, "samples": samples}
                ranks = launch("benchmarks.support.first_step:start", RANKS, arguments, timeout=TIMEOUT)
                found.append(max(ranks, key=lambda rank: rank["wrap"] + rank["step"]))
    except WorkerError as error:
        return {"name": name_of(case), "error": str(error)}
    seconds = {how: median(each["wrap"] + each["step"] for each in found) for how, found in seen.items()}
    return {
        "name": name_of(case),
        "seconds": seconds,
        "seen": seen,
        "extra_seconds": seconds["estimated"] - seconds["fsdp2"],
        "extra_seconds_measured": seconds["measured"] - seconds["fsdp2"],
    }
