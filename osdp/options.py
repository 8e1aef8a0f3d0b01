"""What a caller may choose beside the model: each option is declared, documented and given its default here.

``OSDP`` and ``make_plan`` take ``**options: Unpack[PlanOptions]``, so that editors complete them and type
checkers see a misspelt one; :func:`lists_options` puts what is said of them into the docstrings of both. What
they leave to the search (schedules, modes, slices) follows from them here too.
"""

import difflib
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, cast

import torch

from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.model.training import Training
from osdp.plan.dims import ParallelDims
from osdp.plan.schedule import split_backward_refused
from osdp.plan.schedules import ONE_STAGE, SCHEDULE_KINDS
from osdp.plan.search_options import SLICES, SearchOptions
from osdp.plan.sharding import Mode
from osdp.profiler.cache import DEFAULT_CACHE_DIR

#: Values of ``start=``.
MEASURED, ESTIMATED = "measured", "estimated"

Documented = TypeVar("Documented", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beside its type and its documentation.

    Attributes:
        default: Its value where nothing is chosen.
        planning: Whether it only says how to plan, so that beside a finished plan it would change nothing.
    """

    default: Any = None
    planning: bool = True


class PlanOptions(TypedDict, total=False):
    """Options of planning, all of which may be left out.

    Attributes:
        profile: A profile to plan with, which saves measuring; or one for each of ``local_batches``.
        pp: Pipeline-parallel degree: the model is cut into stages, and each rank keeps only its own.
        dp: Data-parallel ranks, of each stage if there are several; of ``pp`` and ``dp`` one follows from the
            other.
        tp: Tensor-parallel degree.
        sequence_parallel: Whether tensor-parallel ranks also shard the sequence, in the parts of a layer that
            each would otherwise compute whole.
        schedule: Order of forwards and backwards in a pipeline (:data:`osdp.plan.schedule.SCHEDULES`); the
            fastest that can run if ``None``.
        mode: Another name of ``schedule``.
        strategy: A mode to force on every operator, such as ``"FULL_SHARD"``.
        local_batches: Local batches to choose from, with stages samples of a microbatch; the plan with the
            most samples per second wins.
        microbatches: Numbers of microbatches a step to choose from likewise; by default the training's, or
            with stages four per rank of a pipeline if that is one.
        global_batch: Samples of all ranks in a step. Local batch, microbatches and recomputation are then
            chosen together so that they make it up: among the local batches that divide a rank's share, up to
            the sample batch's, unless ``local_batches`` names some or they are those of ``profile``.
        slices: Numbers of slices, powers of two, that an operator may run in; none if empty, where
            ``strategy`` or ``two_step`` forces something.
        recompute: Whether blocks may be recomputed in backward (activation checkpointing); not where
            ``strategy`` or ``two_step`` forces something.
        offload: Whether parameters and optimizer states may be offloaded to host memory where nothing else
            fits; on accelerators only, and not in stages.
        group_sizes: Ranks of the groups that plans may have; all whose links are known, or on several
            machines those of one machine, if ``None``.
        two_step: Whether units that are sharded over all ranks are gathered and reduced across such groups
            and inside them one after the other; the search decides if ``None``.
        search_seconds: Time limit of the search: it goes on until its plan is proven best or these seconds
            are over, and the notes say what is left unproven. Rank 0 searches and the others wait, which they
            do no longer than the process group's time-out. By default a bounded number of rounds, of a second
            to a few for a model of hundreds of operators.
        auto_wrap_policy: A policy of torch or fairscale; what it would wrap is decided as one.
        param_dtype: Dtype parameters are computed in; overrides the training's, as ``reduce_dtype`` does.
        reduce_dtype: Dtype gradients are reduced in.
        double_backward: Whether backwards are differentiated themselves (``create_graph=True``), as for
            gradient penalties; everything is then replicated, and nothing sliced or recomputed.
        cache_dir: Folder in which measurements of the last 30 days are looked up and kept, by default in the
            user's cache folder (:data:`osdp.profiler.cache.DEFAULT_CACHE_DIR`); ``None`` measures anew.
        start: ``"measured"``: links and layers are measured before the first step, which takes seconds to a
            minute. ``"estimated"``: what is not in the cache is estimated from a look at links and
            cores, memory by its upper end, and the plan is refined while it trains; on CPUs, without stages.
    """

    profile: Annotated[Profile | Sequence[Profile] | None, Option()]
    # What of these a finished plan was made for is compared with it (osdp.resolve.check_reuse).
    pp: Annotated[int | None, Option(planning=False)]
    dp: Annotated[int | None, Option(planning=False)]
    tp: Annotated[int | None, Option(planning=False)]
    sequence_parallel: Annotated[bool, Option(False)]
    schedule: Annotated[str | None, Option()]
    mode: Annotated[str | None, Option()]
    strategy: Annotated[str | Mode | None, Option()]
    local_batches: Annotated[Sequence[int], Option(())]
    microbatches: Annotated[Sequence[int], Option(())]
    global_batch: Annotated[int | None, Option()]
    slices: Annotated[Sequence[int], Option(SLICES)]
    recompute: Annotated[bool, Option(True)]
    offload: Annotated[bool, Option(True)]
    group_sizes: Annotated[Sequence[int] | None, Option()]
    two_step: Annotated[bool | None, Option()]
    search_seconds: Annotated[float | None, Option()]
    auto_wrap_policy: Annotated[Callable[..., Any] | None, Option()]
    param_dtype: Annotated[str | torch.dtype | None, Option()]
    reduce_dtype: Annotated[str | torch.dtype | None, Option()]
    double_backward: Annotated[bool, Option(False, planning=False)]
    cache_dir: Annotated[str | Path | None, Option(DEFAULT_CACHE_DIR, planning=False)]
    start: Annotated[str, Option(MEASURED)]


def declared() -> dict[str, Option]:
    """All options, by name."""
    return {name: hint.__metadata__[0] for name, hint in PlanOptions.__annotations__.items()}


def defaults() -> dict[str, Any]:
    """What each option is where nothing is chosen."""
    return {name: option.default for name, option in declared().items()}


def complete(options: PlanOptions, caller: Callable[..., Any]) -> PlanOptions:
    """``options`` with the default of each that was left out.

    Args:
        options: What ``caller`` was given.
        caller: A function or class that takes them.

    Raises:
        TypeError: Some do not exist; names all of them.
    """
    check_known(options, caller)
    return cast(PlanOptions, defaults() | dict(options))


def check_known(options: Mapping[str, Any], caller: Callable[..., Any], others: Sequence[str] = ()) -> None:
    """Refuse what ``caller`` does not take, with the name that was probably meant.

    Args:
        options: What it was given.
        caller: A function or class.
        others: What it takes beside its own parameters and these options.

    Raises:
        TypeError: Some do not exist; names all of them.
    """
    parameters = inspect.signature(caller).parameters.values()
    named = [item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    known = [*named, *declared()]
    unknown = [_with_nearest(name, [*known, *others]) for name in options if name not in (*known, *others)]
    if unknown:
        nouns = "option" if len(unknown) == 1 else "options"
        raise TypeError(
            f"{caller.__name__} has no {nouns} {', '.join(unknown)}. There are {', '.join(known)}"
        )


def _with_nearest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"{name!r} (did you mean {nearest[0]!r}?)" if nearest else repr(name)


def check_together(options: PlanOptions, dims: ParallelDims | None) -> None:
    """Refuse options that do not go with the degrees of parallelism; ``None`` is data parallelism alone.

    Raises:
        ValueError: There are some; says what would give them a meaning.
    """
    if schedule_of(options) is not None and dims is None:
        raise ValueError("schedule= orders the stages of a pipeline, of which there is one: pass pp=, too")
    if options["sequence_parallel"] and (dims is None or dims.tp == 1):
        raise ValueError("sequence_parallel shares a sequence among tensor-parallel ranks: pass tp=, too")
    seconds = options["search_seconds"]
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"search_seconds= is a time limit, more than 0 and finite, not {seconds}")
    if seconds is not None and dims is not None:
        raise ValueError(
            "search_seconds= limits the search of plans without stages and tensor parallelism: leave it out"
        )
    if options["start"] not in (MEASURED, ESTIMATED):
        raise ValueError(f"start= is {MEASURED!r} or {ESTIMATED!r}, not {options['start']!r}")
    if options["start"] == ESTIMATED and dims is not None:
        raise ValueError(
            f"start={ESTIMATED!r} is refined while it trains, which plans with stages or tensor parallelism "
            "cannot be: leave it out"
        )
    if options["start"] == ESTIMATED and options["group_sizes"] is not None:
        raise ValueError(
            f"start={ESTIMATED!r} looks at links among all ranks alone, so that group_sizes= would mean "
            "nothing: leave one of them out"
        )


def schedule_of(options: PlanOptions) -> str | None:
    """``schedule``, or its other name.

    Raises:
        ValueError: Both are given and differ.
    """
    schedule, mode = options["schedule"], options["mode"]
    if schedule is not None and mode is not None and schedule != mode:
        raise ValueError(f"schedule={schedule!r} and mode={mode!r} are two names of one option: pass one")
    return schedule or mode


def usable_schedules(name: str | None, dims: ParallelDims, training: Training) -> tuple[str, ...]:
    """The schedule that was asked for, or those that can run.

    Raises:
        ValueError: It is unknown, or cannot run.
    """
    alone = dims.dp == dims.tp == 1 and training.param_dtype is None and training.reduce_dtype is None
    if name is None:
        if dims.pp == 1:
            return (ONE_STAGE,)
        return tuple(known for known, kind in SCHEDULE_KINDS.items() if alone or not kind.splits_backward)
    if name not in SCHEDULE_KINDS:
        raise ValueError(f"schedule {name!r} is unknown; there are {', '.join(SCHEDULE_KINDS)}")
    if SCHEDULE_KINDS[name].splits_backward and not alone:
        raise split_backward_refused(name, dims.dp, dims.tp)
    return (name,)


def allowed_modes(options: PlanOptions) -> tuple[Mode, ...]:
    """The modes that may be used.

    Raises:
        ValueError: The strategy is unknown, has no collectives in two steps or no second backward.
    """
    strategy, two_step = options["strategy"], options["two_step"]
    if options["double_backward"]:
        if two_step or str(strategy or Mode.NO_SHARD) != Mode.NO_SHARD:
            other = "two_step=True" if two_step else f"strategy={strategy}"
            raise ValueError(
                "double_backward=True keeps everything whole, since a backward that gathers cannot be "
                f"differentiated: it does not go with {other}"
            )
        return (Mode.NO_SHARD,)
    if two_step and str(strategy) in (Mode.NO_SHARD, Mode.HYBRID_SHARD):
        raise ValueError(f"two_step=True is for units sharded over all ranks, of which {strategy} has none")
    if strategy is None:
        return tuple(Mode)
    names = [mode.value for mode in Mode]
    if str(strategy) not in names:
        raise ValueError(f"strategy {str(strategy)!r} is unknown; there are {', '.join(names)}")
    return (Mode(str(strategy)),)


def make_search_options(allowed: tuple[Mode, ...], options: PlanOptions, device: DeviceInfo) -> SearchOptions:
    """What the search may use.

    Raises:
        ValueError: What is forced needs links that are unknown.
    """
    two_step = options["two_step"]
    free = allowed == tuple(Mode) and not two_step
    found = SearchOptions(
        allowed=allowed,
        slices=tuple(options["slices"]) if free else (),
        recompute=options["recompute"] and free,
        offload=options["offload"],
        two_step=two_step,
    )
    if found.needs_groups and not device.group_sizes:
        asked = "two_step=True" if two_step else "strategy='HYBRID_SHARD'"
        raise ValueError(
            f"{asked} needs groups of ranks, of which DeviceInfo knows no links: pass group_sizes=(2,), for "
            "example, here or to DeviceInfo.detect(group_sizes=...), which several machines need not"
        )
    return found


def lists_options(documented: Documented) -> Documented:
    """List the options in the docstring of what takes them, below its line ``**options``."""
    # There are no docstrings under ``python -OO``.
    head, mark, rest = (documented.__doc__ or "").partition("**options:")
    if mark:
        line, newline, rest = rest.partition("\n")
        entries = textwrap.indent("\n".join(_documentation()), " " * (_indent(head) + 4))
        documented.__doc__ = f"{head}{mark}{line}\n{entries}{newline}{rest}"
    return documented


def _indent(text: str) -> int:
    """Columns of its last line, before what follows it."""
    return len(text) - text.rfind("\n") - 1


def _documentation() -> list[str]:
    """What the docstring of :class:`PlanOptions` says of each option."""
    said = inspect.cleandoc(PlanOptions.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.split(r"^(?=\w)", textwrap.dedent(said), flags=re.MULTILINE)
    return [entry.rstrip() for entry in entries if entry.strip()]
