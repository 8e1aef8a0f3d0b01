"""``OSDP``: the module that stands where ``FSDP(model)`` stood."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.comm.embeddings import check_embeddings
from osdp.integrations.fairscale import mark, marks_here, with_marked_options
from osdp.model_desc import ModelDesc
from osdp.pipeline_plan import PipelinePlan
from osdp.plan import Plan
from osdp.profile import Profile
from osdp.profiler.cache import DEFAULT_CACHE_DIR
from osdp.runtime import AppliedPlan
from osdp.runtime.mesh import device_of
from osdp.runtime.module_api import PlannedModule
from osdp.runtime.moved import check_not_moved
from osdp.runtime.optimizer_check import OptimizerCheck
from osdp.runtime.pipelined import AppliedPipeline, steps_of
from osdp.runtime.plain import Wrapped, check_plain
from osdp.runtime.plain_states import load_into
from osdp.runtime.replaced import PlainParameters
from osdp.runtime.torch_private.modules import share_registries
from osdp.search.rules import SLICES
from osdp.stepped import Stepped
from osdp.training import Training
from osdp.wrapping import applied_model, check_reuse

if TYPE_CHECKING:
    from osdp.device_info import DeviceInfo


class OSDP(Stepped, Wrapped, PlannedModule, nn.Module):
    """Optimal sharded data parallelism: plans for a model, shards it accordingly and runs it.

    The wrapper registers what the model registers, under the same names: ``state_dict()``,
    ``named_parameters()`` and optimizers see the original names and whole shapes (DTensors where sharded).
    Attributes and methods it lacks are the model's. Every rank makes it with the same arguments; all start
    from rank 0's weights and buffers.

    An exception in forward or backward leaves it ready for the next step. After a failed backward all
    gradients are dropped, since those of some operators are missing. The first step of an optimizer that
    keeps other state than the plan's ``training`` raises :class:`PlanMismatchError`.

    Args:
        model: The plain model; changed in place. May be built on ``meta``.
        model_desc: Its ModelDesc, or a sample batch to describe it with.
        device_info: The DeviceInfo, or a memory limit such as ``"8GiB"``.
        training: How it is trained; a default is derived if ``None``.
        plan: A plan to run, which saves planning.
        profile: A profile to plan with, which saves measuring.
        mesh: A mesh with one axis; for stages and tensor parallelism one with the axes ``pp``, ``dp`` and
            ``tp``; one over all ranks if ``None``.
        pp: Ranks of a pipeline: the model is cut into stages, of which each rank keeps its own.
        dp: Data-parallel ranks; of ``pp`` and ``dp`` one follows from the other.
        tp: Ranks that compute one layer together.
        sequence_parallel: Whether these share the sequence, too, where they would all compute the same.
        schedule: Order of forwards and backwards in a pipeline (:data:`osdp.schedule.SCHEDULES`); the fastest
            if ``None``.
        mode: Another name of ``schedule``.
        strategy: A mode to force on every operator, such as ``"FULL_SHARD"``.
        local_batches: Local batches to choose from; the plan with the most samples per second wins.
        microbatches: Numbers of microbatches a step to choose from likewise.
        slices: Numbers of slices, powers of two, that an operator may run in; empty: none does.
        recompute: Whether blocks may be computed again in backward instead of keeping their activations.
        offload: Whether states may live in host memory where nothing else fits.
        group_sizes: Ranks of the groups that plans may have; all whose links are known if ``None``.
        two_step: Whether units that are sharded over all ranks are gathered and reduced across such groups
            and inside them one after the other; the search decides if ``None``.
        auto_wrap_policy: A policy of torch or fairscale; what it would wrap is decided as one.
        param_dtype: Dtype parameters are computed in.
        reduce_dtype: Dtype gradients are reduced in.
        loss_fn: How the loss is made of the model's output, for planning.
        find_unused_parameters: Whether parameters may go without a gradient in a step, on some ranks or on
            all; where ``False`` that is an error. Costs a small all-reduce a step.
        double_backward: Whether backwards are differentiated (``create_graph=True``), as for gradient
            penalties; everything is then replicated.
        cache_dir: Where measurements of the last 30 days are looked up and kept, by default in the user's
            folder (:data:`osdp.profiler.cache.DEFAULT_CACHE_DIR`); ``None`` measures anew.

    Attributes:
        module: The model.
        plan: The plan it runs under.

    Raises:
        RuntimeError: There is no process group.
        ValueError: The model is wrapped already.
        PlanMismatchError: ``plan`` was made for something else.
        InfeasibleError: Nothing fits the memory limit.
    """

    module: nn.Module
    plan: Plan | PipelinePlan
    _applied: AppliedPlan | AppliedPipeline
    _optimizer_check: OptimizerCheck

    def __new__(cls, model: nn.Module, *args: Any, **options: Any) -> Any:
        """Inside fairscale's ``enable_wrap`` only mark ``model`` as a unit of decision and return it."""
        if marks_here(cls):
            return mark(model, options, _OPTIONS)
        return nn.Module.__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        model_desc: "ModelDesc | Any" = None,
        device_info: "DeviceInfo | str | int | None" = None,
        *,
        training: Training | None = None,
        plan: Plan | PipelinePlan | None = None,
        profile: Profile | None = None,
        mesh: DeviceMesh | None = None,
        pp: int | None = None,
        dp: int | None = None,
        tp: int | None = None,
        sequence_parallel: bool = False,
        schedule: str | None = None,
        mode: str | None = None,
        strategy: str | None = None,
        local_batches: Sequence[int] = (),
        microbatches: Sequence[int] = (),
        slices: Sequence[int] = SLICES,
        recompute: bool = True,
        offload: bool = True,
        group_sizes: Sequence[int] | None = None,
        two_step: bool | None = None,
        auto_wrap_policy: Callable[..., Any] | None = None,
        param_dtype: str | torch.dtype | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        loss_fn: Callable[..., Any] | None = None,
        find_unused_parameters: bool = True,
        double_backward: bool = False,
        cache_dir: str | Path | None = DEFAULT_CACHE_DIR,
    ) -> None:
        super().__init__()
        check_plain(model)
        check_embeddings(model)
        given = {
            "model_desc": model_desc,
            "device_info": device_info,
            "training": training,
            "plan": plan,
            "profile": profile,
            "mesh": mesh,
            "pp": pp,
            "dp": dp,
            "tp": tp,
            "sequence_parallel": sequence_parallel,
            "schedule": schedule,
            "mode": mode,
            "strategy": strategy,
            "local_batches": local_batches,
            "microbatches": microbatches,
            "slices": slices,
            "recompute": recompute,
            "offload": offload,
            "group_sizes": group_sizes,
            "two_step": two_step,
            "auto_wrap_policy": auto_wrap_policy,
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
            "loss_fn": loss_fn,
            "find_unused_parameters": find_unused_parameters,
            "double_backward": double_backward,
            "cache_dir": cache_dir,
        }
        options = with_marked_options(model, given, _DEFAULTS)
        chosen = options.pop("plan")
        check_reuse(model, chosen, options, _DEFAULTS)
        before = PlainParameters(model)
        self._own(applied_model(model, chosen, options), before)

    def _own(self, applied: AppliedPlan | AppliedPipeline, before: PlainParameters) -> None:
        # Registered as a child the model would put "module." before every name.
        self.__dict__["module"] = applied.model
        self.__dict__["plan"] = applied.plan
        self.__dict__["_applied"] = applied
        self.__dict__["_steps"] = steps_of(applied)
        if isinstance(applied, AppliedPipeline):
            # What checkpoints of stages need to know (osdp.runtime.checkpoint.InStages).
            self.__dict__["owners"] = applied.owners
            self.__dict__["stage_group"] = applied.stage_group
        share_registries(self, applied.model)
        named = applied.model.named_parameters(remove_duplicate=False)
        stored = {name: applied.stored(parameter) for name, parameter in named}
        replaced = before.replaced_by(stored)
        self.__dict__["_optimizer_check"] = OptimizerCheck(
            stored.values(), applied.plan, replaced, lambda: applied.awaits_backward, applied.computing
        )
        self.training = applied.model.training

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh it runs on.

        ``model.mesh["dp"].get_local_rank()`` of ``model.mesh["dp"].size()`` says which batches are this
        rank's, whatever the layout, unless the mesh was given and has no axis of that name.
        """
        mesh: DeviceMesh = self._applied.mesh
        return mesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns.

        Raises:
            RuntimeError: It is cut into stages, of which this rank has only some.
        """
        self._check_alone()
        return self._applied.forward(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside keep their gradients; the first one outside reduces them all.

        ``plan.reduce_each_microbatch`` says which way the plan was priced: if it is false, run all
        microbatches but the last in here; if it is true, keeping gradients takes more memory than planned.
        """
        context: AbstractContextManager[None] = self._applied.no_sync()
        return context

    @property
    def _osdp_applied(self) -> AppliedPlan:
        if isinstance(self._applied, AppliedPipeline):
            raise RuntimeError(
                "the methods of FSDP2 are not for stages, which communicate as their schedule says; they "
                "accumulate inside a step: pass train_step(..., num_microbatches=)"
            )
        return self._applied

    @property
    def _osdp_module(self) -> nn.Module:
        return self.module

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their joint norm is at most ``max_norm``; the norm before.

        Raises:
            RuntimeError: The norm is infinite or NaN, and ``error_if_nonfinite`` is set.
        """
        norm: torch.Tensor = self._applied.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        return norm

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as an optimizer must see them, also between a forward and its backward."""
        pairs = self.module.named_parameters(prefix, recurse, remove_duplicate)
        if not self._applied.computes:
            yield from pairs
            return
        for name, parameter in pairs:
            yield name, self._applied.stored(parameter)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state dict: original names, DTensors where sharded."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a plain state dict, whole and the same on each rank, or what :meth:`state_dict` gave.

        What rank 0 alone has: :func:`osdp.runtime.checkpoint.load_whole_state_dict`.

        Raises:
            ValueError: ``assign`` is set.
            RuntimeError: Names or shapes differ.
        """
        if assign:
            raise ValueError(
                "assign=True would replace the parameters that the optimizer and the shards refer to; "
                "load with assign=False, which copies into them"
            )
        if isinstance(self._applied, AppliedPipeline):
            return self._applied.load_state_dict(state_dict, strict)
        return load_into(self.module, state_dict, strict)

    def train(self, mode: bool = True) -> "OSDP":
        """Set the model's training mode."""
        self.training = mode
        self._applied.train(mode)
        return self

    def extra_repr(self) -> str:
        """The modes of the plan, or its degrees."""
        if isinstance(self.plan, PipelinePlan):
            return f"pp={self.plan.pp}, dp={self.plan.dp}, tp={self.plan.tp}, schedule={self.plan.schedule}"
        return ", ".join(f"{name}={mode}" for name, mode in self.plan.modes.items())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__:
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """As under FSDP2, which leaves the model itself: its forward reads what is set here."""
        module = self.__dict__.get("module")
        if module is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def apply(self, fn: Callable[[nn.Module], None]) -> "OSDP":
        """Call ``fn`` with every module of the model, whose parameters are what is stored of them."""
        if isinstance(self._applied, AppliedPlan):
            self._applied.settle()
        self.module.apply(fn)
        return self

    def __getitem__(self, key: Any) -> Any:
        """A layer of a Sequential, or a slice of it."""
        module: Any = self.module
        return module[key]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "OSDP":
        check_not_moved(self.parameters(), device_of(self._applied.mesh), fn)
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "an OSDP model cannot be pickled, nor copied by copy.copy: its shards and hooks belong to one "
            "set of process groups; save state dicts, by osdp.runtime.checkpoint.save for example"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            "an OSDP model cannot be copied: its shards and hooks belong to one set of process groups; copy "
            "the plain model before wrapping it, or use state dicts. For an average of its weights, in place "
            "of AveragedModel(model), keep one of its parameters and update that after each step by what "
            "torch.optim.swa_utils has, get_ema_multi_avg_fn or get_swa_multi_avg_fn:\n"
            "    average = [p.detach().clone() for p in model.parameters()]\n"
            "    get_ema_multi_avg_fn(decay)(average, [p.detach() for p in model.parameters()], None)"
        )


#: What a caller can choose; fairscale's ``enable_wrap`` may be given them too.
_OPTIONS = tuple(inspect.signature(OSDP.__init__).parameters)[2:]

#: Their values where nothing is chosen.
_DEFAULTS = {name: inspect.signature(OSDP.__init__).parameters[name].default for name in _OPTIONS}

#: The long name, as in the paper's code.
OptimalShardedDataParallel = OSDP
