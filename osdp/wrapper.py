"""``OSDP``: the module that stands where ``FSDP(model)`` stood."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from osdp.comm.groups import device_of
from osdp.integrations import fsdp_arguments
from osdp.integrations.fairscale import mark, marks_here
from osdp.integrations.fsdp_arguments import FSDPArguments
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.nn.embeddings import check_embeddings
from osdp.options import ESTIMATED, PlanOptions, check_known, complete, lists_options
from osdp.plan.measured import MemoryReport
from osdp.plan.plan import Plan
from osdp.refine.checks import check_all_refine, check_can_refine, check_refine
from osdp.refine.refinement import Refinement
from osdp.refine.refiner import Refiner
from osdp.resolve import Asked, applied_model, check_reuse
from osdp.runtime import ShardedModel
from osdp.runtime.checkpoint import load_pretrained
from osdp.runtime.checkpoint.background import forget_copy
from osdp.runtime.checkpoint.pretrained import save_as_transformers
from osdp.runtime.computation import Computation
from osdp.runtime.measured_steps import MeasuredSteps
from osdp.runtime.mesh import data_parallel_axis, device_type
from osdp.runtime.module.moved import check_not_moved
from osdp.runtime.module.plain import Wrapped, check_plain
from osdp.runtime.module.plain_states import laid_out_like
from osdp.runtime.module.replaced import PlainParameters
from osdp.runtime.optimizer.check import OptimizerCheck
from osdp.runtime.running import RunningModel
from osdp.runtime.sharding.backward_pass import Backwards
from osdp.runtime.sharding.module_api import PlannedModule
from osdp.runtime.stages import StageLinks
from osdp.runtime.steps import StepRunner
from osdp.runtime.switch import TakenApart, check_switch, with_inner
from osdp.runtime.uncounted_memory import tell_of_too_little
from osdp.stepped import Stepped
from osdp.torch_private.modules import share_registries

if TYPE_CHECKING:
    from pathlib import Path

    from osdp.hardware.device_info import DeviceInfo


def _tell_hidden(model: nn.Module) -> None:
    """Warn of methods of ``model`` that are called by other names once it is wrapped."""
    # Not of generate(), which calls the model's own where it is called like that.
    hidden = [name for name in ("train_step", "eval_step", "predict") if hasattr(type(model), name)]
    if hidden:
        warnings.warn(
            f"{', '.join(hidden)} of {type(model).__name__} are also names of methods of OSDP, which hides "
            f"them: call model.module.{hidden[0]}(...)",
            stacklevel=3,
        )


class OSDPOptions(PlanOptions, FSDPArguments, total=False):
    """Options of planning, and the arguments of FSDP.

    Attributes:
        refine: Whether to refine the plan while it trains: :meth:`OSDP.refine` with the optimizers that step;
            by default with ``start="estimated"`` alone.
    """

    refine: bool


@lists_options
class OSDP(Stepped, Wrapped, PlannedModule, nn.Module):
    """Optimal sharded data parallelism: plans for a model, shards it accordingly and runs it.

    The wrapper registers what the model registers, under the same names: ``state_dict()``,
    ``named_parameters()`` and optimizers see the original names and whole shapes (DTensors where sharded).
    Attributes and methods it lacks are the model's. Every rank makes it with the same arguments; all start
    from rank 0's weights and buffers.

    The arguments of FSDP and ``fully_shard`` are taken as well
    (:class:`osdp.integrations.fsdp_arguments.FSDPArguments`), so that a call keeps those it had.

    An exception in forward or backward leaves it ready for the next step. After a failed backward all
    gradients are dropped, since those of some operators are missing. The first step of an optimizer of
    ``torch.optim`` that keeps more state than there is room for raises :class:`PlanMismatchError`; one that
    is not known, or keeps less than was planned, is warned about.

    Args:
        model: The plain model; changed in place. May be built on ``meta``.
        model_desc: Its ModelDesc, or a sample batch to describe it with; a :class:`osdp.BatchMix` of several.
        device_info: The DeviceInfo, or a memory limit such as ``"8GiB"``.
        training: How it is trained; a default is derived if ``None``.
        plan: A plan to run, which saves planning.
        mesh: A mesh with one axis; for stages and tensor parallelism one with the axes ``pp``, ``dp`` and
            ``tp``; one over all ranks if ``None``.
        loss_fn: How the loss is made of the model's output, for planning.
        find_unused_parameters: Whether parameters may go without a gradient in a step, on some ranks or on
            all; where ``False`` that is an error. Costs a small all-reduce a step where anything is sharded.
        **options: Any of :class:`osdp.options.PlanOptions`:

    Attributes:
        module: The model.
        plan: The plan it runs under.

    Raises:
        TypeError: An option does not exist.
        RuntimeError: There is no process group.
        ValueError: The model is wrapped already, or an option does not fit another.
        PlanMismatchError: ``plan`` was made for something else.
        InfeasibleError: Nothing fits the memory limit.
    """

    module: nn.Module
    plan: Plan
    stage_links: StageLinks
    _applied: RunningModel
    _optimizer_check: OptimizerCheck
    _measured: MeasuredSteps
    _settings: tuple[Backwards, Computation]
    _refiner: Refiner | None
    _plan_was_given: bool

    def __new__(cls, model: nn.Module, *args: Any, **options: Any) -> Self:
        """Inside fairscale's ``enable_wrap`` only mark ``model`` as a unit of decision and return it."""
        if marks_here(cls):
            check_known(options, OSDP, fsdp_arguments.names())
            here, computation = fsdp_arguments.translated(options)
            if computation != Computation():
                raise ValueError(
                    "output_dtype, cast_forward_inputs and param_init_fn hold for the whole model: pass them "
                    "to the root's call, outside of enable_wrap"
                )
            # fairscale says of its own wrap that it returns a module, which is what callers rely on there.
            return cast(Self, mark(model, here))
        return nn.Module.__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        model_desc: "ModelDesc | Any" = None,
        device_info: "DeviceInfo | str | int | None" = None,
        *,
        training: Training | None = None,
        plan: Plan | None = None,
        mesh: DeviceMesh | None = None,
        loss_fn: Callable[..., Any] | None = None,
        find_unused_parameters: bool = True,
        **options: Unpack[OSDPOptions],
    ) -> None:
        super().__init__()
        refine = options.pop("refine", options.get("start") == ESTIMATED)
        check_known(options, OSDP, fsdp_arguments.names())
        here, computation = fsdp_arguments.translated(options)
        asked_for = here.pop("mesh", None)
        if mesh is not None and asked_for not in (None, mesh):
            raise ValueError("mesh= is another than device_mesh= or process_group=: pass one of them")
        mesh = asked_for if mesh is None else mesh
        if mesh is not None:
            mesh, groups = data_parallel_axis(mesh)
            here = (groups if plan is None else {}) | here
        chosen = complete(cast(PlanOptions, here), OSDP)
        check_plain(model)
        _tell_hidden(model)
        check_embeddings(model)
        asked = Asked(
            model_desc,
            device_info,
            training,
            plan,
            mesh,
            loss_fn,
            find_unused_parameters,
            chosen,
            computation,
        ).beside_marks(model)
        check_reuse(model, asked)
        if refine:
            device = device_type(model) if mesh is None else device_of(mesh).type
            check_can_refine(device, asked.model_desc, asked.plan, is_cut=asked.is_cut)
        fsdp_arguments.check_device(options.get("device_id"), model, mesh)
        before = PlainParameters(model)
        backwards = Backwards(asked.find_unused_parameters, asked.options["double_backward"])
        self.__dict__["_settings"] = backwards, asked.computation
        self.__dict__["_refiner"], self.__dict__["_plan_was_given"] = None, plan is not None
        self._own(applied_model(model, asked), before)
        if self.plan.is_whole:
            check_all_refine(self.mesh, refines=bool(refine))
        if refine:
            self._check_alone()
            self.__dict__["_refiner"] = Refiner(self, (), None, keeps=plan is not None)

    # What can be passed is what __init__ takes: that is what help() and inspect.signature() are to show.
    functools.update_wrapper(__new__, __init__, assigned=(), updated=())

    def _own(self, applied: RunningModel, before: PlainParameters) -> None:
        # Registered as a child the model would put "module." before every name.
        self.__dict__["module"] = applied.model
        self.__dict__["plan"] = applied.plan
        self.__dict__["_applied"] = applied
        self.__dict__["_steps"] = StepRunner(applied)
        # What checkpoints need to know of stages (osdp.runtime.checkpoint.save_load).
        self.__dict__["stage_links"] = applied.links
        share_registries(self, applied.model)
        # Who reads the signature (transformers' Trainer drops columns that forward does not take) finds the
        # model's.
        if (
            "forward" not in self.__dict__
        ):  # after a switch it may be somebody's, such as Accelerate's autocast
            forward = functools.partial(type(self).forward, self)
            forward.__signature__ = inspect.signature(applied.model.forward)  # type: ignore[attr-defined]
            self.__dict__["forward"] = forward
        named = applied.model.named_parameters(remove_duplicate=False)
        stored = {name: applied.stored(parameter) for name, parameter in named}
        replaced = before.replaced_by(stored)
        device = device_of(applied.mesh)
        measured = MeasuredSteps(applied.plan, device)
        in_pipeline = applied.mesh["pp"].get_local_rank() if applied.plan.pp > 1 else 0
        tell_of_too_little(applied.plan, device, in_pipeline)
        self.__dict__["_measured"] = measured
        self.__dict__["_optimizer_check"] = OptimizerCheck(
            applied, stored, replaced, measured, self._note_step
        )
        self.training = applied.model.training

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh it runs on.

        ``model.mesh["dp"].get_local_rank()`` of ``model.mesh["dp"].size()`` says which batches are this
        rank's, whatever the layout, unless the mesh was given and has no axis of that name.
        """
        return self._applied.mesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns.

        Raises:
            RuntimeError: It is cut into stages, of which this rank has only some.
            ValueError: Tensor-parallel ranks were given different batches; only the first ones are compared.
        """
        self._check_alone()
        self.begin_step()
        if self.plan.tp > 1 and not torch.compiler.is_compiling():
            self._steps.compare_first((args, kwargs))
        return self._applied.forward(*args, **kwargs)

    def begin_step(self, num_microbatches: int = 0, *, follows_plan: bool = False) -> None:
        """Where a plan is refined, and the model is between two steps, this may switch it.

        Forwards and :meth:`train_step` call it; others need it only where forwards run inside of
        ``optimizer.step(closure)``, which is no place to switch in.

        Args:
            num_microbatches: Microbatches that ``train_step`` is about to run.
            follows_plan: Whether the loop reads ``plan.reduce_each_microbatch`` in every step, so that a plan
                that reduces otherwise may be switched to.
        """
        # All that a compiled forward reads of it: the end of the refinement compiles it once more.
        if self._refiner is not None and self._refiner.result is None:
            self._refiner.before_forward(num_microbatches, follows_plan=follows_plan)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside keep their gradients; the first one outside reduces them all.

        ``plan.reduce_each_microbatch`` says which way the plan was priced: if it is false, run all
        microbatches but the last in here; if it is true, keeping gradients takes more memory than planned.
        """
        return self._without_sync() if self.plan.is_whole else self._applied.no_sync()

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        before = self._applied.sharded.syncs
        self._applied.sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._applied.sharded.set_syncs(before)  # of the plan that it runs under by then

    @property
    def _osdp_applied(self) -> ShardedModel:
        return self._applied.sharded

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
        return self._applied.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    # PlannedModule's look up what parameters stand for; those here are the stored ones.
    zero_grad = nn.Module.zero_grad
    requires_grad_ = nn.Module.requires_grad_

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
        return self._applied.load_state_dict(state_dict, strict)

    def switch(self, plan: Plan, optimizer: Optimizer | Sequence[Optimizer] = ()) -> None:
        """Go on under another plan, with the same weights and optimizer states; every rank calls it.

        Between two steps, and without going to disk: at most one tensor is whole at a time. Gradients that
        the optimizers have taken are dropped; those that one gathers before its first step stay. The model
        has other parameters afterwards, and so do the optimizers. What else refers to the earlier ones is
        named in a warning: a list for clipping goes on with gradients of the later ones, and an average of
        weights raises.

        Args:
            plan: Any plan of this model for as many ranks, such as one for another memory limit.
            optimizer: The optimizer, or all of them; also in wrappers, as Accelerate and Lightning have.

        Raises:
            TypeError: There is no such plan or optimizer.
            ValueError: The plan has stages or offloads, an optimizer is left out that has stepped, or modules
                came into the model after it was wrapped.
            PlanMismatchError: The plan was made for another model or number of ranks; lists all differences.
            RuntimeError: The model is cut into stages, or gradients wait for a step.
        """
        is_one = any(isinstance(each, Optimizer) for each in with_inner(optimizer))
        given: Any = [optimizer] if is_one else optimizer
        optimizers = [each for one in given for each in with_inner(one)]
        stepped = self._optimizer_check.optimizers
        in_step = self._optimizer_check.is_in_step
        check_switch(self._applied.sharded, plan, optimizers, stepped, in_step=in_step)
        for each in optimizers:
            self._optimizer_check.exchange_in(each)
        if self._refiner is not None:
            self._refiner.pause()
        forget_copy(self)
        taken = TakenApart(self._applied.sharded, optimizers, self._optimizer_check.close())
        # They refer to what the last plan stored, which is to be freed meanwhile.
        for name in ("_applied", "_steps", "_optimizer_check", "_measured"):
            del self.__dict__[name]
        applied, fault = taken.go_on(plan, *self._settings)
        self._own(applied, taken.before)
        self._optimizer_check.remember(stepped)
        taken.tell_left()
        if fault is not None:
            raise fault

    def refine(self, optimizer: Optimizer | Sequence[Optimizer], *, steps: int | None = None) -> None:
        """Find out from the next steps what they take, and switch to a faster plan if there is one.

        Every rank calls it, between two steps. Some of the next 30 steps (or, where the batch changes, a few
        more) are timed by unit; links, compute and the optimizer's step are corrected by that, and the plan
        is searched again on rank 0, for which the others wait. Where another saves more in the steps that are
        left than a :meth:`switch` takes, and more than the steps differ, the model goes on under it, at the
        beginning of a forward. It has other parameters then, and what refers to the earlier ones is named, as
        after :meth:`switch`. Once :attr:`refinement` is there, nothing changes any more. A plan that was
        given with ``plan=`` is kept; what another would win is told. Until then all ranks have to run every
        forward with gradients.

        Args:
            optimizer: The optimizer, or all of them; also in wrappers.
            steps: Steps that are left to train; about a thousand are assumed if ``None``.

        Raises:
            TypeError: There is no optimizer.
            ValueError: An optimizer is not the model's or is left out, ranks differ in ``steps``, the plan
                does not contain what it was searched from, or devices are no CPUs.
            RuntimeError: The model is cut into stages, or gradients wait for a step.
        """
        self._check_alone()
        is_one = any(isinstance(each, Optimizer) for each in with_inner(optimizer))
        given: Any = [optimizer] if is_one or not isinstance(optimizer, Sequence) else optimizer
        found = [each for one in given for each in with_inner(one)]
        for each in found:
            if isinstance(each, Optimizer):
                self._optimizer_check.exchange_in(each)
        check_refine(self, found, self._optimizer_check.optimizers, steps)
        refiner = Refiner(self, found, steps, keeps=self._plan_was_given)
        if self._refiner is not None:
            self._refiner.stop()
        self.__dict__["_refiner"] = refiner

    def _note_step(self, optimizer: Optimizer) -> None:
        if self._refiner is not None:
            self._refiner.note_step(optimizer)

    @property
    def refinement(self) -> Refinement | None:
        """What :meth:`refine` has found; ``None`` until its last decision."""
        return None if self._refiner is None else self._refiner.result

    @contextmanager
    def summon_full_params(
        self,
        *,
        writeback: bool = True,
        recurse: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside, modules hold whole plain parameters, to look at or to change; all ranks call it.

        ``OSDP.summon_full_params(model)`` as well as ``model.summon_full_params()``. Forwards are not for
        inside. Every rank holds the whole model meanwhile.

        Args:
            writeback: Whether changes are kept; they must be the same on all ranks.
            recurse: As in FSDP; only ``True``.
            rank0_only: As in FSDP; only ``False``.
            offload_to_cpu: As ``rank0_only``.
            with_grads: As in FSDP; only ``False``.

        Raises:
            RuntimeError: The model is cut into stages.
            ValueError: An argument of FSDP has another value.
        """
        if rank0_only or offload_to_cpu or with_grads or not recurse:
            raise ValueError(
                "summon_full_params() gives whole parameters, without gradients, to all ranks, where they "
                "are: for the CPU of rank 0 there is osdp.runtime.checkpoint.whole_state_dict(model), and "
                "full_tensor() for a single gradient"
            )
        applied = self._applied.sharded
        applied.settle()
        whole = {}
        for parameter in applied.parameters:
            stored = parameter.stored.detach()
            value = stored.full_tensor() if isinstance(stored, DTensor) else stored
            whole[parameter.name] = nn.Parameter(value.clone(), requires_grad=parameter.stored.requires_grad)
        for parameter in applied.parameters:
            parameter.owned.register(whole[parameter.name])
        try:
            yield
        finally:
            for parameter in applied.parameters:
                changed = whole[parameter.name].detach()
                parameter.owned.register(parameter.stored)
                if writeback:
                    with torch.no_grad():
                        parameter.stored.copy_(laid_out_like(parameter.stored, changed))

    # Where FSDP says how state_dict() is to be; torch's own functions find nothing of theirs in the model.
    state_dict_type = set_state_dict_type = staticmethod(fsdp_arguments.refuse_state_dict_types)
    optim_state_dict = optim_state_dict_to_load = staticmethod(fsdp_arguments.refuse_state_dict_types)

    def memory_report(self) -> MemoryReport:
        """Seconds of a step and memory of this rank, as measured and as planned.

        Rank 0 logs it once after the first steps.
        """
        return self._measured.report()

    def load_pretrained(self, folder: "str | Path") -> None:
        """Read weights in the format of Hugging Face, each rank its own shards; every rank calls it.

        Args:
            folder: What ``save_pretrained`` wrote, this model's or the plain one's.

        Raises:
            FileNotFoundError: There is no such folder, or it has no safetensors.
            ValueError: Names or shapes differ; lists them. Nothing was changed.
        """
        load_pretrained(self, folder)

    @property
    def save_pretrained(self) -> Callable[..., None]:
        """Writes a folder that ``from_pretrained`` opens, as models of transformers do; every rank calls it.

        Called with the folder. No rank ever holds the whole model, so ``is_main_process`` and
        ``save_function``, which scripts for Accelerate pass, are not needed.

        Raises:
            TypeError: It is called with a ``state_dict``: what is written are the model's own weights.
            AttributeError: It is no model of transformers or PEFT; for others there is
                :func:`osdp.runtime.checkpoint.save_pretrained`, which writes the weights alone.
        """
        if not hasattr(type(self.module), "save_pretrained"):
            raise AttributeError(f"{type(self.module).__name__} has no save_pretrained")
        return functools.partial(save_as_transformers, self)

    def train(self, mode: bool = True) -> "OSDP":
        """Set the model's training mode."""
        self.training = mode
        self._applied.train(mode)
        return self

    def extra_repr(self) -> str:
        """The modes of the plan, or its degrees."""
        return self.plan.summary

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
        is_own = module is None or name in self.__dict__ or hasattr(type(self), name)
        if is_own:
            super().__setattr__(name, value)
        # Who restores the mode of each of modules(), as Lightning does, finds the wrapper and children.
        if module is not None and (not is_own or name == "training"):
            setattr(module, name, value)

    def apply(self, fn: Callable[[nn.Module], None]) -> "OSDP":
        """Call ``fn`` with every module of the model, whose parameters are what is stored of them."""
        self._applied.settle()
        self.module.apply(fn)
        return self

    def __getitem__(self, key: Any) -> Any:
        """A layer of a Sequential, or a slice of it."""
        module: Any = self.module
        return module[key]

    def __len__(self) -> int:
        """The number of layers of a Sequential."""
        module: Any = self.module
        return len(module)

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers of a Sequential."""
        module: Any = self.module
        return iter(module)

    def __bool__(self) -> bool:
        """Always true: a model that is no Sequential has no length."""
        return True

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


#: The long name, as in the paper's code.
OptimalShardedDataParallel = OSDP
