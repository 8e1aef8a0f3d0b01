"""Folders of Hugging Face, sharded safetensors with an index, written and read without the whole model.

Each rank writes the shards it has to where they belong in files of the usual size, in a temporary folder;
these then replace the old ones. Reading, each rank reads its own slices of the files. Weights bear the names
of the model's parameters.
"""

import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from osdp.codec import read_json
from osdp.comm.objects import broadcast_object, gather_objects, is_first
from osdp.runtime.checkpoint.blocked_states import in_blocks_of, in_one_block
from osdp.runtime.checkpoint.folder import read_into, sync
from osdp.runtime.checkpoint.local_tensors import digest, owned_part, refuse_meta, take_ranks_own
from osdp.runtime.checkpoint.safetensors_files import (
    INDEX,
    WholeTensor,
    create_files,
    lay_out,
    write_parts,
)
from osdp.runtime.checkpoint.steps import url_fault
from osdp.runtime.ranks.shared_faults import raise_together
from osdp.runtime.stages import StageLinks

#: Bytes of an exported file, as transformers has it.
_FILE_BYTES = 5 * 10**9

#: Weights in a folder of Hugging Face.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_SINGLE = "model.safetensors"
_ONE_OF_ONE = "model-00001-of-00001.safetensors"

#: How the temporary folder's name begins.
_NEW = ".saving-"

#: Number of names that a message lists.
_LISTED = 5


def save_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Write the weights of ``model`` to ``folder`` as transformers' ``from_pretrained`` reads them.

    Every rank calls it. Beside the weights, of a model of transformers its configurations; of a PEFT model
    its adapters alone. Existing weights in the folder are replaced when all new ones are on disk.

    Args:
        model: A model under any plan, or plain.
        folder: The folder; created if it does not exist.

    Raises:
        RuntimeError: A rank could not write; raised on all ranks.
        ValueError: Safetensors have no such dtype as some tensors.
    """
    raise_together(url_fault(folder))
    module, path = _module_of(model), Path(folder)
    # Stored parameters are registered between steps only.
    state = in_one_block(dict(get_model_state_dict(model)))
    fault: Exception | None = None
    if hasattr(module, "peft_config"):
        plan = getattr(model, "plan", None)
        if plan is not None and plan.pp > 1:
            raise ValueError(
                f"adapters of a model in {plan.pp} stages are not written: rank 0, where PEFT writes them, "
                "has those of one stage. Load osdp.runtime.checkpoint.whole_state_dict(model), which rank 0 "
                "gets, into the plain model there, and save that"
            )
        _save_adapters(module, state, path)
        return
    state = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name in _left_out(model):
        state.pop(name, None)
    new = path / f"{_NEW}{broadcast_object(secrets.token_hex(6))}"
    mine = {name: WholeTensor(value.dtype, tuple(value.shape)) for name, value in state.items()}
    of_ranks = take_ranks_own(model, state)
    # Of all ranks, in the order of their stages.
    everyone = gather_objects((mine, digest(state)))
    files = lay_out(
        {name: tensor for tensors, _ in everyone for name, tensor in tensors.items()}, _FILE_BYTES
    )
    digests = [names for _, names in everyone]
    try:
        try:
            if is_first():
                for left in path.glob(f"{_NEW}*"):
                    if left.is_dir():  # by a save that was killed
                        shutil.rmtree(left, ignore_errors=True)
                new.mkdir(parents=True)
                create_files(new, files)
        except OSError as error:
            fault = error
        raise_together(fault, f"nothing was saved at {path}")
        try:
            # On every rank: a host may remember for a while that there was no such folder.
            new.mkdir(parents=True, exist_ok=True)
            write_parts(new, files, owned_part(state, digests) | of_ranks)
        except FileNotFoundError:
            shutil.rmtree(new, ignore_errors=True)  # which nobody else sees
            fault = RuntimeError(
                f"{socket.gethostname()} does not see what rank 0 writes to {path.absolute()}: name one "
                "folder, on a file system that all ranks share"
            )
        except Exception as error:  # of tensors without bytes, or no memory; the other ranks wait
            fault = error
        raise_together(fault, f"{path} has the weights it had before")
        try:
            if is_first():
                _publish(new, path)
                _save_configurations(module, path)
        except Exception as error:  # transformers refuses some configurations; the other ranks wait
            fault = error
        raise_together(fault, f"{path} may have a part of the new weights")
    finally:
        if is_first():
            shutil.rmtree(new, ignore_errors=True)


def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Read weights in the format of Hugging Face into ``model``, each rank its own shards.

    Every rank calls it. Parameters that are tied are read once.

    Args:
        model: A model under any plan, or plain.
        folder: A folder with ``model.safetensors``, or with several files and their index. Other files in
            it, such as copies in another dtype, are not read.

    Raises:
        FileNotFoundError: There is no such folder, or it has no safetensors, or not all that its index names.
        ValueError: Names or shapes differ, which are listed; or there is no index to several files, as a
            save leaves them that was killed; or the model is on ``meta``. Nothing was changed.
        RuntimeError: A rank could not read a file; the model may be partly overwritten.
    """
    path = Path(folder)
    refuse_meta(model)
    reader, metadata, fault = HuggingFaceStorageReader(str(path)), Metadata({}), None
    try:
        reader.fs = _OnlyFiles([str(path / name) for name in _weight_files(path)])
        metadata = reader.read_metadata()
    except (OSError, ValueError, RuntimeError) as error:
        fault = error
    except Exception as error:  # of safetensors, which has an exception of its own without a public base
        fault = ValueError(f"{path} cannot be read: {error}")
    raise_together(fault)
    state = in_one_block(dict(get_model_state_dict(model)))
    state = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    saved = metadata.state_dict_metadata
    # A tied parameter may be there under other names, too.
    for name in _left_out(model):
        if name not in saved:
            state.pop(name, None)
    _check(state, saved, path)
    read_into(state, path, reader)
    set_model_state_dict(model, in_blocks_of(model, state), options=StateDictOptions(strict=False))
    # A copy in another stage is there under its owner's name.
    links: StageLinks = getattr(model, "stage_links", StageLinks())
    for tied in links.tied:
        tied.start_equal()


class _OnlyFiles(FileSystem):
    """A file system whose folders have these files alone."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """The files."""
        return self._files


def _weight_files(folder: Path) -> list[str]:
    """The files with the model's weights, as transformers chooses them but for the index, which comes first.

    It is the last to be written and the first to be removed.
    """
    names = [name for name in os.listdir(folder) if _WEIGHTS.fullmatch(name)]
    if (folder / INDEX).exists():
        try:
            listed = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / INDEX} is no index: it has no weight_map") from error
        missing = [name for name in listed if not (folder / name).exists()]
        if missing and _SINGLE in names:
            return [_SINGLE]  # transformers leaves the index of what it has replaced
        if missing:
            raise FileNotFoundError(f"{folder} lacks {_few(missing)}, which {INDEX} names")
        return listed
    if _SINGLE in names:
        return [_SINGLE]
    if names == [_ONE_OF_ONE]:
        return names
    if names:
        raise ValueError(
            f"{folder} has {_few(sorted(names))} and no {INDEX}: a save into it was interrupted, and they "
            "may be of several saves"
        )
    raise FileNotFoundError(f"{folder} has no model*.safetensors")


def _module_of(model: nn.Module) -> nn.Module:
    """The model itself, where it is wrapped."""
    inner = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model


def _left_out(model: nn.Module) -> Iterable[str]:
    """Names that transformers does not save: other names of tied parameters, and what it can make anew."""
    module, plan = _module_of(model), getattr(model, "plan", None)
    named = dict(module.named_parameters(remove_duplicate=False))
    tied: Iterable[str] | None = getattr(module, "all_tied_weights_keys", None)
    if tied is None:
        first = dict(module.named_parameters())
        tied = [name for name in named if name not in first]
    elif plan is not None and plan.pp > 1:
        copies = {name for tie in plan.ties for name in tie.names}
        tied = [name for name in tied if name in copies]
    elif isinstance(tied, Mapping):
        # What the configuration ties may have been given a parameter of its own since.
        tied = [n for n, other in tied.items() if n not in named or named[n] is named.get(other, named[n])]
    return [*tied, *(getattr(module, "_keys_to_ignore_on_save", None) or ())]


def _publish(new_files: Path, folder: Path) -> None:
    """Move the new files into ``folder``, the index last, and remove the weights they replace."""
    new = sorted(os.listdir(new_files), key=lambda name: name == INDEX)
    if len(new) > 2:
        # Killed between two files, a folder without an index is refused; with one it would be old and new.
        (folder / INDEX).unlink(missing_ok=True)
    for name in new:
        os.replace(new_files / name, folder / name)
    sync(folder)
    for name in os.listdir(folder):
        if _WEIGHTS.fullmatch(name) and name not in new:
            (folder / name).unlink()


def _save_configurations(module: nn.Module, folder: Path) -> None:
    config: Any = getattr(module, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy(config)
        # A model that computes the loss in slices has transformers' own inside.
        config.architectures = [type(vars(module).get("model_with_logits", module)).__name__]
        with suppress(StopIteration):
            config.dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
        config.save_pretrained(folder)
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def _save_adapters(module: Any, state: dict[str, Any], folder: Path) -> None:
    from peft import get_peft_model_state_dict

    # Other weights are those of the base model, which adapters refer to. Adapters may be frozen: some are
    # loaded only to be used.
    adapters = {
        id(value)
        for name in module.peft_config
        for value in get_peft_model_state_dict(module, state_dict=state, adapter_name=name).values()
    }
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    whole = {}
    for name, value in state.items():
        if name not in trained and id(value) not in adapters:
            continue
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        if is_first():
            whole[name] = tensor.cpu()
    fault: Exception | None = None
    try:
        if is_first():
            module.save_pretrained(folder, state_dict=whole)
    except Exception as error:  # safetensors has exceptions of its own; the other ranks wait in any case
        fault = error
    raise_together(fault, f"{folder} may have a part of the new adapters")


def _check(state: Mapping[str, torch.Tensor], saved: Mapping[str, Any], path: Path) -> None:
    """Raise on all ranks if names or shapes differ."""
    known = set().union(*gather_objects(set(state)))
    missing = [name for name in state if name not in saved]
    stray = sorted(set(saved) - known)
    shapes = [
        f"{name} has the shape {tuple(entry.size)} there and {tuple(value.shape)} here"
        for name, value in state.items()
        for entry in [saved.get(name)]
        if isinstance(entry, TensorStorageMetadata) and entry.size != value.shape
    ]
    faults = [f"it lacks {_few(missing)}"] if missing else []
    faults += [f"only it has {_few(stray)}"] if stray else []
    faults += [_few(shapes)] if shapes else []
    fault = ValueError("; ".join(faults)) if faults else None
    raise_together(fault, f"{path} has the weights of another model; nothing was loaded")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def save_as_transformers(
    model: nn.Module,
    folder: "str | Path",
    *,
    is_main_process: bool = True,
    save_function: Any = None,
    state_dict: Any = None,
) -> None:
    """:func:`save_pretrained` with the arguments that scripts pass to models of transformers.

    Args:
        model: The wrapped model.
        folder: Where.
        is_main_process: Ignored, as is ``save_function``: each rank writes its shards.
        save_function: Ignored.
        state_dict: Must be left out.

    Raises:
        TypeError: A ``state_dict`` is given.
    """
    del is_main_process, save_function
    if state_dict is not None:
        raise TypeError(
            "save_pretrained of an OSDP model writes its own weights, by shards: leave out state_dict=, "
            "and call it on every rank; other weights are saved by model.module.save_pretrained on rank 0"
        )
    save_pretrained(model, folder)
