"""What a caller may choose beside the model: each option is declared, documented and given its default here.

``OSDP``, ``make_plan`` and ``make_pipeline_plan`` take ``**options: Unpack[PlanOptions]``, so that editors
complete them and type checkers see a misspelt one; :func:`lists_options` puts what is said of them into the
docstrings of these three.
"""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar, cast

import torch

from osdp.hardware.profile import Profile
from osdp.integrations.fairscale import is_same
from osdp.plan.plan import Mode
from osdp.profiler.cache import DEFAULT_CACHE_DIR
from osdp.search.options import SLICES

#: A plan of the whole model on data-parallel ranks, or one of stages.
PlanKind = Literal["whole", "stages"]

Documented = TypeVar("Documented", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beside its type and its documentation.

    Attributes:
        default: Its value where nothing is chosen.
        whole: Whether planning for a whole model reads it.
        stages: Whether planning for stages reads it.
        planning: Whether it only says how to plan, so that beside a finished plan it would change nothing.
    """

    default: Any = None
    whole: bool = True
    stages: bool = True
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
        auto_wrap_policy: A policy of torch or fairscale; what it would wrap is decided as one.
        param_dtype: Dtype parameters are computed in; overrides the training's, as ``reduce_dtype`` does.
        reduce_dtype: Dtype gradients are reduced in.
        find_unused_parameters: Whether parameters may go without a gradient in a step, on some ranks or on
            all; where ``False`` that is an error. Costs a small all-reduce a step where anything is sharded.
        double_backward: Whether backwards are differentiated themselves (``create_graph=True``), as for
            gradient penalties; everything is then replicated, and nothing sliced or recomputed.
        cache_dir: Folder in which measurements of the last 30 days are looked up and kept, by default in the
            user's cache folder (:data:`osdp.profiler.cache.DEFAULT_CACHE_DIR`); ``None`` measures anew.
    """

    profile: Annotated[Profile | Sequence[Profile] | None, Option()]
    # What of these a finished plan was made for is compared with it (osdp.resolve.check_reuse).
    pp: Annotated[int | None, Option(whole=False, planning=False)]
    dp: Annotated[int | None, Option(whole=False, planning=False)]
    tp: Annotated[int | None, Option(whole=False, planning=False)]
    sequence_parallel: Annotated[bool, Option(False, whole=False)]
    schedule: Annotated[str | None, Option(whole=False)]
    mode: Annotated[str | None, Option(whole=False)]
    strategy: Annotated[str | Mode | None, Option()]
    local_batches: Annotated[Sequence[int], Option(())]
    microbatches: Annotated[Sequence[int], Option(())]
    slices: Annotated[Sequence[int], Option(SLICES)]
    recompute: Annotated[bool, Option(True)]
    offload: Annotated[bool, Option(True, stages=False)]
    group_sizes: Annotated[Sequence[int] | None, Option()]
    two_step: Annotated[bool | None, Option()]
    auto_wrap_policy: Annotated[Callable[..., Any] | None, Option()]
    param_dtype: Annotated[str | torch.dtype | None, Option()]
    reduce_dtype: Annotated[str | torch.dtype | None, Option()]
    find_unused_parameters: Annotated[bool, Option(True, whole=False, stages=False, planning=False)]
    double_backward: Annotated[bool, Option(False, stages=False, planning=False)]
    cache_dir: Annotated[str | Path | None, Option(DEFAULT_CACHE_DIR, planning=False)]


def declared(kind: PlanKind | None = None) -> dict[str, Option]:
    """The options by name, of one kind of plan or all."""
    known = {name: hint.__metadata__[0] for name, hint in PlanOptions.__annotations__.items()}
    return {name: option for name, option in known.items() if kind is None or getattr(option, kind)}


def defaults() -> dict[str, Any]:
    """What each option is where nothing is chosen."""
    return {name: option.default for name, option in declared().items()}


def complete(options: PlanOptions, caller: Callable[..., Any], kind: PlanKind | None = None) -> PlanOptions:
    """``options`` with the default of each that was left out.

    Args:
        options: What ``caller`` was given.
        caller: A function or class that takes them.
        kind: The kind of plan it makes; ``None`` if it makes both.

    Raises:
        TypeError: Some do not exist, or say nothing of such a plan; names all of them.
    """
    check_known(options, caller, kind)
    return cast(PlanOptions, defaults() | dict(options))


def check_known(options: Mapping[str, Any], caller: Callable[..., Any], kind: PlanKind | None = None) -> None:
    """Refuse what ``caller`` does not take, with the name that was probably meant.

    Raises:
        TypeError: As :func:`complete`; an option at its default says nothing and is never in the way.
    """
    every, mine = declared(), declared(kind)
    parameters = inspect.signature(caller).parameters.values()
    named = [item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    known = [*named, *mine]
    unknown = [name for name in options if name not in named and name not in every]
    idle = {
        name: every[name]
        for name, value in options.items()
        if name in every and name not in mine and not is_same(value, every[name].default)
    }
    faults = []
    if unknown:
        nouns = "option" if len(unknown) == 1 else "options"
        faults.append(f"has no {nouns} {', '.join(_with_nearest(name, known) for name in unknown)}")
    if idle:
        users = [f"{name}={options[name]!r}, which is for {_user(option)}" for name, option in idle.items()]
        faults.append(f"has no use for {'; '.join(users)}")
    if faults:
        raise TypeError(f"{caller.__name__} {', and '.join(faults)}. There are {', '.join(known)}")


def _with_nearest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"{name!r} (did you mean {nearest[0]!r}?)" if nearest else repr(name)


def _user(option: Option) -> str:
    """Who reads it."""
    if option.stages:
        return "make_pipeline_plan and OSDP"
    return "make_plan and OSDP" if option.whole else "OSDP"


def taken_by(kind: PlanKind, options: PlanOptions) -> PlanOptions:
    """What of ``options`` planning of this ``kind`` reads."""
    mine = declared(kind)
    return cast(PlanOptions, {name: value for name, value in options.items() if name in mine})


def schedule_of(options: PlanOptions) -> str | None:
    """``schedule``, or its other name.

    Raises:
        ValueError: Both are given and differ.
    """
    schedule, mode = options["schedule"], options["mode"]
    if schedule is not None and mode is not None and schedule != mode:
        raise ValueError(f"schedule={schedule!r} and mode={mode!r} are two names of one option: pass one")
    return schedule or mode


def lists_options(kind: PlanKind | None = None) -> Callable[[Documented], Documented]:
    """List the options in the docstring of what takes them, below its line ``**options``.

    Args:
        kind: The kind of plan it makes; all options are listed if ``None``.
    """

    def listed(documented: Documented) -> Documented:
        # There are no docstrings under ``python -OO``.
        head, mark, rest = (documented.__doc__ or "").partition("**options:")
        if mark:
            line, newline, rest = rest.partition("\n")
            entries = textwrap.indent("\n".join(_documentation(kind)), " " * (_indent(head) + 4))
            documented.__doc__ = f"{head}{mark}{line}\n{entries}{newline}{rest}"
        return documented

    return listed


def _indent(text: str) -> int:
    """Columns of its last line, before what follows it."""
    return len(text) - text.rfind("\n") - 1


def _documentation(kind: PlanKind | None) -> list[str]:
    """What the docstring of :class:`PlanOptions` says of each option."""
    said = inspect.cleandoc(PlanOptions.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.split(r"^(?=\w)", textwrap.dedent(said), flags=re.MULTILINE)
    mine = declared(kind)
    return [entry.rstrip() for entry in entries if entry.partition(":")[0] in mine]
