"""A checkpoint of a training as a file or folder that others open; needs no ranks, and no model."""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from osdp.runtime.checkpoint.background import wait_for_saves
from osdp.runtime.checkpoint.contents import read_verified
from osdp.runtime.checkpoint.folder import describe_failures
from osdp.runtime.checkpoint.kept import KeptState
from osdp.runtime.checkpoint.restricted import RestrictedPlanner, RestrictedReader
from osdp.runtime.checkpoint.steps import latest_step
from osdp.torch_private.saving import in_one_process

#: Bytes of a file of safetensors; as much is in memory at a time.
FILE_BYTES = 2 * 10**9

_MODEL = "model."


@dataclass(frozen=True)
class CheckpointSummary:
    """What a checkpoint has.

    Attributes:
        folder: Where it is.
        is_summed: Whether it has a manifest, with which all its bytes were compared.
        step: The number of steps that were made, if it was given.
        world_size: Number of ranks that saved it; 0 if that is not known.
        kept: Names of what it has beside model and optimizer.
        weights: Shape and dtype of the model's tensors, by name.
        optimizer_bytes: Bytes of the optimizer states.
    """

    folder: Path
    is_summed: bool
    step: int | None
    world_size: int
    kept: tuple[str, ...]
    weights: dict[str, tuple[tuple[int, ...], torch.dtype]]
    optimizer_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's tensors."""
        return sum(_nbytes(shape, dtype) for shape, dtype in self.weights.values())


def summarize(path: str | Path) -> CheckpointSummary:
    """What a checkpoint has, after checking all its bytes.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: There is no complete checkpoint in it, or it was altered.
    """
    wait_for_saves()
    folder = latest_step(path)
    contents = read_verified(folder)
    kept = KeptState.read(folder, contents).plain
    tensors = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in contents.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    ranks: list[Mapping[str, Any]] = kept.get("ranks") or []
    words = [name for name in ("scheduler", "extra") if kept.get(name) is not None]
    words += [name for name in ("rng", "data") if any(mine[name] is not None for mine in ranks)]
    return CheckpointSummary(
        folder=folder,
        is_summed=contents.files is not None,
        step=kept.get("step"),
        world_size=len(ranks),
        kept=tuple(words),
        weights={n.removeprefix(_MODEL): spec for n, spec in tensors.items() if n.startswith(_MODEL)},
        optimizer_bytes=sum(_nbytes(*spec) for n, spec in tensors.items() if n.startswith("optimizer.")),
    )


def export(path: str | Path, output: str | Path, *, config: str | Path | None = None) -> None:
    """Write the weights of a checkpoint in a format of others.

    Args:
        path: The checkpoint; of several steps the latest.
        output: A folder of safetensors with an index, as Hugging Face has it; or, if it ends in ``.pt``,
            ``.pth`` or ``.bin``, a file for ``torch.load(weights_only=True)``, for which all weights are in
            memory at once.
        config: A folder whose ``config.json`` and ``generation_config.json`` are copied, so that
            ``from_pretrained`` of transformers opens ``output``.

    Raises:
        FileNotFoundError: The checkpoint, or ``config.json``, does not exist.
        FileExistsError: ``output`` exists.
        ValueError: The checkpoint is not complete, or was altered.
    """
    wait_for_saves()
    source, target = latest_step(path), Path(output)
    if target.exists():
        raise FileExistsError(f"{target} exists; name another one, or remove it")
    if config is not None and not (Path(config) / "config.json").exists():
        raise FileNotFoundError(f"{config} has no config.json")
    metadata = read_verified(source).metadata
    specs = {
        name.removeprefix(_MODEL): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    # A name of its own: what a killed export left is in nobody's way.
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if target.suffix in (".pt", ".pth", ".bin"):
            torch.save(_read(source, metadata, specs), partial)
        else:
            partial.mkdir(parents=True)
            _write_safetensors(source, metadata, specs, partial)
            for name in ("config.json", "generation_config.json"):
                if config is not None and (Path(config) / name).exists():
                    shutil.copy(Path(config) / name, partial / name)
        os.replace(partial, target)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)


def _write_safetensors(
    source: Path, metadata: Metadata, specs: Mapping[str, TensorStorageMetadata], folder: Path
) -> None:
    # Only here: a plain file needs no safetensors.
    from safetensors.torch import save_file

    files: list[dict[str, TensorStorageMetadata]] = [{}]
    filled = 0
    for name, entry in specs.items():
        size = _nbytes(tuple(entry.size), entry.properties.dtype)
        if files[-1] and filled + size > FILE_BYTES:
            files.append({})
            filled = 0
        files[-1][name] = entry
        filled += size
    places: dict[str, str] = {}
    total = 0
    for number, part in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        tensors = _read(source, metadata, part)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf8")


def _read(
    source: Path, metadata: Metadata, specs: Mapping[str, TensorStorageMetadata]
) -> dict[str, torch.Tensor]:
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for name, entry in specs.items()
    }
    state: dict[str, Any] = {"model": weights}
    try:
        with in_one_process():
            reader = RestrictedReader(source, metadata)
            state_dict_loader.load(state, storage_reader=reader, planner=RestrictedPlanner())
    except CheckpointException as error:
        raise RuntimeError(f"{source} cannot be read: {describe_failures(error)}") from error
    return weights


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count
