"""Seconds and bytes of saving and loading, beside torch's and transformers' own ways by hand."""

import gc
import os
import shutil
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from benchmarks.support.live_bytes import LiveBytes
from benchmarks.support.models import CASES, loss_of
from osdp import OSDP, Plan
from osdp.runtime import checkpoint
from tests.habits.running.plans import plan_of

ROUNDS = 6
#: Seconds in which the system deals with gigabytes that were removed: a save follows steps, not that.
SETTLING = 1.0


def save_by_hand(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What an expert writes, files synced to disk."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    writer = FileSystemWriter(folder, sync_files=True)
    state_dict_saver.save({"model": of_model, "optimizer": of_optimizer}, storage_writer=writer)


def load_by_hand(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The same."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    state_dict_loader.load(state, storage_reader=FileSystemReader(folder))
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def export_by_hand(folder: str, model: OSDP) -> None:
    """Weights gathered to rank 0, which writes them as transformers does."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        model.module.save_pretrained(folder, state_dict=state)
    _synced(folder)


def export(folder: str, model: OSDP) -> None:
    """Our own, which has synced them by then."""
    model.save_pretrained(folder)
    _synced(folder)


def measure_costs(rank: int, world_size: int, *, case: str, plan: str, folder: str) -> dict[str, Any]:
    """Worker: seconds of both ways in turns, and bytes of ours."""
    from osdp import ModelDesc, Training

    del rank
    model, batch = CASES[case].model(), CASES[case].sample(2)
    desc = ModelDesc.from_module(model, batch)
    training = Training(local_batch=2)
    wrapped = OSDP(model, plan=plan_of(plan, desc, training, world_size))
    optimizer = torch.optim.AdamW(wrapped.parameters())
    loss_of(wrapped(**batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds: dict[str, list[float]] = {}
    ours, theirs = f"{folder}/ours", f"{folder}/theirs"
    runs: dict[str, Callable[[], object]] = {
        "save": lambda: checkpoint.save(ours, wrapped, optimizer),
        "save by hand": lambda: save_by_hand(theirs, wrapped, optimizer),
        "load": lambda: checkpoint.load(ours, wrapped, optimizer),
        "load by hand": lambda: load_by_hand(theirs, wrapped, optimizer),
        "export": lambda: export(ours, wrapped),
        "export by hand": lambda: export_by_hand(theirs, wrapped),
    }
    for turn in range(ROUNDS + 1):
        # What comes second finds the disk busy with what came first: they take turns.
        order = ("", " by hand") if turn % 2 else (" by hand", "")
        took = {f"save{who}": _timed(runs[f"save{who}"]) for who in order}
        took |= {f"cached load{who}": _timed(runs[f"load{who}"]) for who in order}
        _forget(ours, theirs)
        took |= {f"load{who}": _timed(runs[f"load{who}"]) for who in order}
        _removed(ours, theirs)
        took |= {f"export{who}": _timed(runs[f"export{who}"]) for who in order}
        _removed(ours, theirs)
        time.sleep(SETTLING)
        dist.barrier()
        start = time.perf_counter()
        saving = checkpoint.save_async(ours, wrapped, optimizer)
        took["stall"] = time.perf_counter() - start
        saving.wait()
        dist.barrier()
        for name, value in took.items():
            # The first turn makes what is made once.
            seconds.setdefault(name, []).extend([value] if turn else [])
        if turn < ROUNDS:
            _removed(ours)
    unit = _largest_unit(wrapped.plan)
    live = LiveBytes()
    return {
        "seconds": {name: median(values) for name, values in seconds.items()},
        "state_bytes": sum(entry.stat().st_size for entry in os.scandir(ours)),
        "unit_bytes": unit,
        "save_peak": _peak(live, lambda: checkpoint.save(ours, wrapped, optimizer)),
        "load_peak": _peak(live, lambda: checkpoint.load(ours, wrapped, optimizer)),
    }


def _removed(*folders: str) -> None:
    """Neither way finds an old checkpoint, which ours would remove once the new one is there."""
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in folders:
            shutil.rmtree(folder)
    dist.barrier()


def _synced(folder: str) -> None:
    """Wait until the disk has the files that rank 0 sees."""
    if dist.get_rank() == 0:
        for file in (entry for entry in os.scandir(folder) if entry.is_file()):
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
    dist.barrier()


def _forget(*folders: str) -> None:
    """Let the system forget what it has cached of the files, as after a restart."""
    dist.barrier()
    if dist.get_rank() == 0:
        for file in (entry for folder in folders for entry in os.scandir(folder)):
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def _timed(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def _largest_unit(plan: Plan) -> int:
    """Bytes of the largest unit's parameters, whole."""
    sizes = {decision.operator: decision.nbytes for decision in plan.decisions}
    return max(sum(sizes[name] for name in unit.operators) for unit in plan.units)


def _peak(live: LiveBytes, run: Callable[[], object]) -> int:
    """Most bytes above those before, on the worst rank."""
    gc.collect()
    dist.barrier()
    before = live.now
    live.start()
    run()
    worst = torch.tensor(live.peak - before)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return int(worst)
