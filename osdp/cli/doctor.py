"""``osdp doctor``: what is installed and usable here, and the line that mends what is not."""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from typing import Annotated

import typer

from osdp import __version__, codec
from osdp.text import align, format_bytes

#: Libraries beside torch that parts of osdp use, the extra that installs each, and what it is for.
_LIBRARIES = {
    "transformers": ("hf", "models of transformers, OSDPTrainer"),
    "accelerate": ("", "OSDPAccelerator"),
    "lightning": ("", "OSDPStrategy"),
    "typer": ("cli", "the osdp command"),
    "pyyaml": ("cli", "cluster files in YAML"),
    "tqdm": ("cli", "progress bars"),
    "matplotlib": ("report", "pictures"),
    "plotly": ("report", "HTML reports"),
    "fairscale": ("", "wrap, enable_wrap"),
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: The thing.
        found: What is there.
        is_fine: Whether it can be used.
        mend: A line that mends it, or what to know about it; empty if there is nothing.
    """

    name: str
    found: str
    is_fine: bool = True
    mend: str = ""


def doctor(
    links: Annotated[
        bool, typer.Option("--links", help="also measure the links between ranks; under torchrun")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Print what is installed and usable here, and how to mend what is not; exits with 1 if something is."""
    checks = [*_checks(), *(_links() if links else ())]
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first rank speaks for all
    if as_json:
        typer.echo(codec.to_json(checks), nl=False)
    else:
        rows = [("", "found", "", "")]
        rows += [(each.name, each.found, "ok" if each.is_fine else "!", each.mend) for each in checks]
        typer.echo(align(rows))
    if not all(each.is_fine for each in checks):
        raise typer.Exit(1)


def _checks() -> Iterator[Check]:
    import torch
    from torch import distributed

    from osdp.profiler.cache import user_folder

    yield Check("osdp", __version__)
    old = sys.version_info < (3, 11)
    yield Check("Python", platform.python_version(), not old, "osdp needs Python 3.11" * old)
    tested = _range_of("torch")
    is_tested = _is_in(torch.__version__, tested)
    yield Check("torch", torch.__version__, is_tested, "" if is_tested else f"pip install 'torch{tested}'")
    has_gloo = distributed.is_available() and distributed.is_gloo_available()
    yield Check(
        "gloo", "available" if has_gloo else "missing", has_gloo, "" if has_gloo else "a torch with it"
    )
    yield from _accelerators()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    yield Check("CPU", f"{cores} cores, OMP_NUM_THREADS={threads or 'not set'}")
    yield from _allocators()
    for name, (extra, purpose) in _LIBRARIES.items():
        yield _library(name, extra, purpose)
    folder = user_folder()
    if folder is None:
        yield Check("cache", "turned off by OSDP_CACHE_DIR")
        return
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(nearest, os.W_OK)
    yield Check("cache", str(folder), writable, "" if writable else "pass cache_dir=, a folder to write to")


def _accelerators() -> Iterator[Check]:
    import torch
    from torch import distributed

    if not torch.cuda.is_available():
        yield Check("GPUs", "none: ranks run on CPUs with gloo")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        busy = free < 0.9 * total
        found = f"{properties.name}, {format_bytes(free)} of {format_bytes(total)} free"
        yield Check(f"GPU {index}", found, mend="another program uses its memory" * busy)
    has_nccl = distributed.is_nccl_available()
    yield Check(
        "NCCL", "available" if has_nccl else "missing", has_nccl, "" if has_nccl else "a torch with it"
    )


def _allocators() -> Iterator[Check]:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    chosen = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    yield Check("allocators", ", ".join(chosen) or "defaults")


def _library(name: str, extra: str, purpose: str) -> Check:
    install = f"pip install 'osdp[{extra}]'" if extra else f"pip install {name}"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "not installed", mend=f"for {purpose}: {install}")
    wanted = _range_of(name)
    if _is_in(found, wanted):
        return Check(name, found)
    return Check(name, found, is_fine=False, mend=f"tested with {wanted}: pip install '{name}{wanted}'")


def _range_of(name: str) -> str:
    """The versions of a library that osdp declares; empty if it declares none."""
    try:
        declared = metadata.requires("osdp") or []
    except metadata.PackageNotFoundError:
        return ""
    for text in declared:
        requirement = text.partition(";")[0].strip()
        if requirement.lower().startswith(name) and requirement[len(name) : len(name) + 1] in "<>=!~ ":
            return requirement[len(name) :].replace(" ", "")
    return ""


def _is_in(version: str, wanted: str) -> bool:
    if not wanted or util.find_spec("packaging") is None:
        return True
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def _links() -> Iterator[Check]:
    from torch import cuda, distributed

    from osdp.hardware.device_info import DeviceInfo

    if not distributed.is_torchelastic_launched():
        yield Check(
            "links", "not measured", False, "torchrun --nproc-per-node 2 --no-python osdp doctor --links"
        )
        return
    if cuda.is_available():
        cuda.set_device(distributed.get_node_local_rank())
    distributed.init_process_group("nccl" if cuda.is_available() else "gloo")
    device = DeviceInfo.detect(cache_dir=None)
    for link in device.links:
        found = f"{link.bandwidth / 1e9:.3g} GB/s after {link.latency * 1e6:.0f} us"
        yield Check(f"{link.collective}, {link.group}", found)
    yield Check(
        "measured", "quiet" if not device.doubts else "doubtful", not device.doubts, "; ".join(device.doubts)
    )
    distributed.destroy_process_group()
