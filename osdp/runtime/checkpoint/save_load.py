"""Distributed checkpoints of model and optimizer, with the original model's names and whole shapes.

A thin layer over ``torch.distributed.checkpoint``: a checkpoint saved under one plan loads under another,
with another world size, in other stages, and into the plain model. Optimizer states are flat, one entry for
each parameter and state, so that each stage can write its own; parameters that several stages hold are
written under their owner's name.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from osdp.comm.objects import gather_objects, has_process_group, is_first
from osdp.plan.plan import Plan
from osdp.runtime.checkpoint.background import (
    AsyncSave,
    Copying,
    background_group,
    room_fault,
    start_copy,
    wait_for_saves,
)
from osdp.runtime.checkpoint.blocked_states import in_blocks_of, in_one_block
from osdp.runtime.checkpoint.contents import Verification, read_verified
from osdp.runtime.checkpoint.folder import NewCheckpoint, describe_failures, interruption_in, read_into
from osdp.runtime.checkpoint.kept import Kept, KeptState, unreadable
from osdp.runtime.checkpoint.local_tensors import (
    digest,
    in_exact_storage,
    local_tensors,
    map_local,
    owned_part,
    refuse_meta,
    take_ranks_own,
)
from osdp.runtime.checkpoint.match import laid_out_as_saved, require_same, with_own_keys
from osdp.runtime.checkpoint.optimizers import (
    SavedOptimizers,
    all_initialised,
    as_made,
    as_they_are,
    in_groups,
    plain_option,
    refuse_others,
    refuse_states,
    thawed,
    without_empty_groups,
    without_options,
)
from osdp.runtime.checkpoint.restricted import RestrictedPlanner, RestrictedReader
from osdp.runtime.checkpoint.steps import latest_step, remove_older_steps, step_folder, url_fault
from osdp.runtime.checkpoint.whole_states import MissingAndUnexpected, send_whole
from osdp.runtime.module.replaced import Replaced
from osdp.runtime.ranks.shared_faults import gather_or_raise, raise_together
from osdp.runtime.stages import StageLinks
from osdp.text import format_bytes
from osdp.torch_private.optimizers import is_stepping
from osdp.torch_private.saving import in_one_process, stored_names

logger = logging.getLogger(__name__)

State = dict[str, Any]

#: What steps a model: an optimizer, or several with some of its parameters each.
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
#: Prefixes of flat names in optimizer state dicts.
_KINDS = ("state", "param_groups")


class SaveOptions(TypedDict, total=False):
    """What :func:`save` takes beside model and optimizer."""

    scheduler: Any
    step: int | None
    rng: bool
    data: Any
    extra: Any
    keep_last: int | None


def _links(model: nn.Module) -> StageLinks:
    """What connects the stages of a model that is wrapped; nothing in a plain one."""
    links: StageLinks = getattr(model, "stage_links", StageLinks())
    return links


def _each(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _adopted(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    """The optimizers, over the model's parameters: they may have been made before it was wrapped."""
    for each in _each(optimizer):
        Replaced().exchange_in(each)
    return _each(optimizer)


def train_state(model: nn.Module, optimizer: Optimizers) -> State:
    """State dicts of ``model`` and its optimizers by the model's FQNs, with tensors sharded as they are.

    Returns:
        ``{"model": ..., "optimizer": ...}``, for ``torch.distributed.checkpoint.save`` and ``load``.
    """
    _adopted(optimizer)
    refuse_others(model, _each(optimizer))
    refuse_states(model, _each(optimizer))
    with without_empty_groups(_each(optimizer)) as stepping:
        if stepping:
            of_model, of_optimizer = get_state_dict(model, stepping, options=_FLAT)
        else:  # a stage that none of the optimizers steps
            of_model, of_optimizer = get_model_state_dict(model), {}
    return {
        "model": in_one_block(of_model),
        "optimizer": _renamed(in_one_block(dict(of_optimizer)), _links(model).owners),
    }


def set_train_state(model: nn.Module, optimizer: Optimizers, state: State) -> None:
    """Load the state dicts of :func:`train_state`, under any plan."""
    _adopted(optimizer)
    of_optimizer = _for_copies(state["optimizer"], _links(model).owners, stored_names(model))
    of_model = in_blocks_of(model, state["model"])
    with without_empty_groups(_each(optimizer)) as stepping:
        if not stepping:
            set_model_state_dict(model, of_model)
            return
        read = in_blocks_of(model, of_optimizer, prefix="state.")
        names = {id(parameter): name for name, parameter in stored_names(model).items()}
        with as_made(stepping, names, read):
            set_state_dict(model, stepping, model_state_dict=of_model, optim_state_dict=read, options=_FLAT)


def _renamed(flat: State, names: Mapping[str, str]) -> State:
    """The flat optimizer state with the parameters in ``names`` renamed."""
    prefixes = {f"{kind}.{old}.": f"{kind}.{new}." for old, new in names.items() for kind in _KINDS}

    def renamed(key: str) -> str:
        old = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
        return key if old is None else prefixes[old] + key.removeprefix(old)

    return {renamed(key): plain_option(value) for key, value in flat.items()}


def _for_copies(flat: State, owners: Mapping[str, str], held: Collection[str]) -> State:
    """The flat optimizer state with each copy given its owner's entries; owners not held here are dropped."""
    found = dict(flat)
    for kind in _KINDS:
        for name, owner in owners.items():
            before = f"{kind}.{owner}."
            for key in [key for key in flat if key.startswith(before)]:
                found[f"{kind}.{name}." + key.removeprefix(before)] = flat[key]
                if owner not in held:
                    found.pop(key, None)
    return found


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    step: int | None = None,
    rng: bool = False,
    data: Any = None,
    extra: Any = None,
    keep_last: int | None = None,
) -> None:
    """Write ``model`` and what else trains it to the folder ``path``; every rank calls it.

    An existing checkpoint in the folder is replaced by one atomic rename when the new one is complete on
    disk: the disk must have room for both, and whenever a rank is killed one of them can be loaded.

    Args:
        path: The folder; with ``keep_last`` one that has a folder for each step.
        model: A model under any plan, or plain.
        optimizer: Its optimizer, or all of several.
        scheduler: A learning-rate scheduler, or whatever else has ``state_dict``.
        step: The number of steps that were made.
        rng: Whether to save the states of the random number generators of all ranks.
        data: This rank's data loader, if it has ``state_dict``.
        extra: Anything of numbers, words, lists, dicts and tensors; rank 0's is kept.
        keep_last: Save to ``path/step-<step>``, and remove all but so many of the latest.

    Raises:
        RuntimeError: A rank could not write; raised on all ranks. The folder keeps its old checkpoint.
        ValueError: ``path`` is not a folder in a file system, ``extra`` or a state cannot be read back, or
            ``keep_last`` has no ``step``, or ``path`` has a later one.
    """
    wait_for_saves()
    state, fault = _stored(model, optimizer)
    raise_together(url_fault(path) or fault, "nothing was saved")
    folder = step_folder(path, step, keep_last)
    kept = KeptState.of(_layout(model), scheduler, step, rng, data, extra).packed()
    of_ranks = take_ranks_own(model, state["model"])
    state = _with(of_ranks, _grouped(model, state))
    _write(NewCheckpoint(folder), map_local(state, in_exact_storage), kept)
    remove_older_steps(path, keep_last)


def save_async(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    **options: Unpack[SaveOptions],
) -> AsyncSave:
    """As :func:`save`, while training goes on: only a copy of this rank's shards is waited for.

    Every rank calls it. On CPUs optimizer states are copied while training goes on already; the next step of
    an optimizer waits for that. Who changes them otherwise calls :meth:`~AsyncSave.wait` before. The copy
    lies in host memory, which is kept for the next one as long as the model has this plan; on CPUs it counts
    against the plan's limit. The next save, and the next load, first wait for the one before.

    Args:
        path: As for :func:`save`.
        model: As for :func:`save`.
        optimizer: As for :func:`save`.
        **options: The other arguments of :func:`save`.

    Returns:
        A handle; what went wrong is raised by its :meth:`~AsyncSave.wait`.

    Raises:
        ValueError: As for :func:`save`; or on CPUs the copy and the plan's peak exceed the plan's limit.
    """
    # Two would hold two copies, and each would take what the other writes for what a killed save has left.
    wait_for_saves()
    step, keep_last = options.get("step"), options.get("keep_last")
    state, refused = _stored(model, optimizer)
    digests = gather_or_raise(url_fault(path) or refused, digest(state), "nothing was saved")
    of_ranks = take_ranks_own(model, state["model"])
    mine = _with(of_ranks, owned_part(_grouped(model, state), digests))
    folder = step_folder(path, step, keep_last)
    steps = Path(path).absolute()
    parts = {name: list(local_tensors(part)) for name, part in mine.items()}
    tensors = [tensor for part in parts.values() for tensor in part]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    raise_together(room_fault(model, nbytes), "nothing was saved")
    if is_first():
        logger.info("a copy of this rank's shards takes %s of host memory", format_bytes(nbytes))
    copying = Copying()
    try:
        start_copy(model, tensors, copying, _copied_later(model, optimizer, parts), _each(optimizer))
        try:
            kept = KeptState.of(
                _layout(model),
                options.get("scheduler"),
                step,
                options.get("rng", False),
                options.get("data"),
                options.get("extra"),
            ).packed()
            new = NewCheckpoint(folder)
        finally:
            fault = copying.wait_for_values()  # copied while ranks agreed
        group = background_group()
        # Training does not wait until the copies are laid out. What they are of is not held after that.
        held = [mine]

        def write() -> None:
            failed, laid_out = fault, {}
            try:
                if failed is None:
                    copies = iter(copying.result.result())
                    laid_out = map_local(held.pop(), lambda _: next(copies))
            except Exception as error:  # the other ranks wait
                failed = error
            try:
                raise_together(failed, f"no checkpoint was saved at {folder}", group)
            except Exception:
                new.discard()
                raise
            try:
                _write(new, laid_out, kept, group)
            finally:
                laid_out.clear()  # an error's traceback would hold the copy
            remove_older_steps(steps, keep_last)

        return AsyncSave(write)
    finally:
        copying.go_on()  # beside training


def _copied_later(
    model: nn.Module, optimizer: Optimizers | None, parts: Mapping[str, Sequence[torch.Tensor]]
) -> list[int]:
    """Places in all ``parts`` of the optimizer states that may be copied when training goes on.

    A step that calls a closure has passed where it would wait. Beside tensor parallelism some states are laid
    out for the checkpoint, in memory that is not to be held beside a forward.
    """
    if any(map(is_stepping, _each(optimizer))) or _layout(model)[1] > 1:
        return []
    names = [name for name, part in parts.items() for _ in part]
    return [place for place, name in enumerate(names) if name == "optimizer"]


def _write(new: NewCheckpoint, state: State, kept: bytes, group: dist.ProcessGroup | None = None) -> None:
    """Write and publish ``state``, over ``group`` if it is not the default one."""
    new.writer.keep(kept)
    try:
        with in_one_process():
            state_dict_saver.save(state, storage_writer=new.writer, process_group=group)
    except CheckpointException as error:
        new.discard()
        if (interruption := interruption_in(error)) is not None:
            raise interruption from error
        raise RuntimeError(
            f"no checkpoint was saved at {new.path}, which has what it had before: {describe_failures(error)}"
        ) from error
    except Exception:
        new.discard()
        raise
    new.remove_old()


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    data: Any = None,
) -> Kept:
    """Read the folder ``path`` into ``model`` and what else trains it; every rank calls it.

    Every byte of the checkpoint is checked first, by all ranks together; nothing in it is run. If the
    states of random number generators were saved, and on as many ranks, they are set. Parameters that had
    not been stepped when it was saved have no optimizer states afterwards either; options that it lacks,
    such as those of a new scheduler, stay as they are.

    Args:
        path: A folder written by :func:`save`, under any plan and world size; or one with several steps, of
            which the latest is read.
        model: A model wrapped under any plan, or plain.
        optimizer: An optimizer of the same class over its parameters, or all of several; ``None`` reads the
            model alone.
        scheduler: What was given as ``scheduler`` when saving.
        data: This rank's data loader; read if it was saved on as many ranks.

    Returns:
        What else was kept.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The checkpoint is incomplete or was altered, or is one of another model or optimizer, or
            of another scheduler or none, or the model is on ``meta``; lists the differences. Nothing was
            changed.
        RuntimeError: A rank could not read a file; the model may be partly overwritten.
    """
    wait_for_saves()
    refuse_meta(model)
    optimizers = _adopted(optimizer)
    folder = latest_step(path)
    verification = Verification.start(folder)
    with thawed(optimizers) as make_states_of_frozen, all_initialised(optimizers):
        state: State = {}
        fault: Exception | None = None
        try:
            # While the disk is read.
            state = _state(model, optimizers)
        except Exception as error:  # the other ranks wait
            fault = error
        contents = verification.finish()
        raise_together(fault, "nothing was loaded")
        kept = KeptState.read(folder, contents)
        kept.check(scheduler, str(folder))
        owners = _links(model).owners
        names = {id(p): owners.get(name, name) for name, p in stored_names(model).items()}
        if any(gather_objects(make_states_of_frozen(names, contents.metadata))):
            state = _state(model, optimizers)
        saved = SavedOptimizers.read(folder, contents.metadata, optimizers, names, state.get("optimizer", {}))
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        wanted = {"model": laid_out_as_saved(state["model"], contents.metadata, device)}
        wanted |= {"optimizer": saved.wanted} if optimizers else {}
        require_same(contents.metadata, wanted, str(folder), saved.options, saved.mixed)
        read = without_options(wanted) if saved.options else wanted
        read_into(read, folder, RestrictedReader(folder, contents.metadata), RestrictedPlanner())
        of_model = {name: with_own_keys(value) for name, value in read["model"].items()}
        if optimizers:
            set_train_state(
                model, optimizers, {"model": of_model, "optimizer": saved.completed(read["optimizer"])}
            )
            saved.drop_unstepped(optimizers, names)
            saved.give_options(optimizers, names)
        else:
            set_model_state_dict(model, in_blocks_of(model, of_model))
    return kept.restore(_layout(model), scheduler, data)


def verify(path: str | Path) -> None:
    """Read all of a checkpoint and compare it with its manifest; with a process group all ranks share that.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The checkpoint is incomplete or was altered, or has no manifest.
    """
    wait_for_saves()
    folder = latest_step(path)
    if read_verified(folder).files is None:
        raise ValueError(
            f"{folder} has no manifest: it was not saved by osdp.runtime.checkpoint.save, and only the sizes "
            "of its files could be checked"
        )


def _stored(model: nn.Module, optimizer: Optimizers | None) -> tuple[State, Exception | None]:
    """What is to be saved, before options are in groups; and what is wrong with it on this rank."""
    try:
        with as_they_are(_adopted(optimizer)):
            state = _state(model, optimizer)
        return state, unreadable(state)
    except Exception as error:  # the other ranks wait
        return {}, error


def _with(of_ranks: State, state: State) -> State:
    """``state`` with what is this rank's own of the model."""
    return {**state, "model": state["model"] | of_ranks}


def _grouped(model: nn.Module, state: State) -> State:
    return in_groups(state, in_stages=_links(model).stage_group is not None)


def _state(model: nn.Module, optimizer: Optimizers | None) -> State:
    if _each(optimizer):
        return train_state(model, _each(optimizer))
    return {"model": in_one_block(dict(get_model_state_dict(model)))}


def _layout(model: nn.Module) -> list[int]:
    """How many ranks there are of each kind: data-parallel, tensor-parallel, stages."""
    plan: Plan | None = getattr(model, "plan", None)
    if plan is None:
        return [dist.get_world_size() if has_process_group() else 1, 1, 1]
    return [plan.dp, plan.tp, plan.pp]


def whole_state_dict(model: nn.Module) -> State:
    """The model's full state dict as plain tensors on the CPU, on rank 0; empty on the others.

    Every rank calls it. Load it into the plain model with ``load_state_dict``, and into a wrapped one with
    :func:`load_whole_state_dict`.
    """
    group = _links(model).stage_group
    if group is None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(model, options=options))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    mine = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in whole.items()}
    gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, gathered, group=group, group_dst=0)
    if dist.get_rank() != 0 or gathered is None:
        return {}
    return {name: value for part in gathered for name, value in part.items()}


def load_whole_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True
) -> MissingAndUnexpected:
    """Load a plain state dict that rank 0 has; the others pass ``{}`` or ``None``.

    Every rank calls it. Tensors are sent one by one, so ranks other than 0 hold at most one whole tensor.

    Args:
        model: A model under any plan, in stages, or plain.
        state_dict: The result of :func:`whole_state_dict` or of the plain model's ``state_dict``.
        strict: Whether missing and unexpected names are an error.

    Returns:
        The missing and unexpected names.

    Raises:
        RuntimeError: Names or shapes differ, as for ``nn.Module.load_state_dict``, the same on all ranks;
            nothing was loaded.
    """
    return send_whole(model, state_dict or {}, _links(model).owners, strict)
