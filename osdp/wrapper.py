"""``OSDP``: the module that stands where ``FSDP(model)`` stood."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.integrations.fairscale import mark, marks_here, with_marked_options
from osdp.model_desc import ModelDesc
from osdp.pipeline_plan import PipelinePlan
from osdp.plan import Plan
from osdp.profile import Profile
from osdp.runtime import AppliedPlan
from osdp.runtime.mesh import device_of
from osdp.runtime.optimizer_check import OptimizerCheck
from osdp.runtime.pipelined import AppliedPipeline, steps_of
from osdp.runtime.steps import Steps
from osdp.runtime.torch_private import share_registries
from osdp.runtime.validate import check_unwrapped
from osdp.search.rules import SLICES
from osdp.training import Training
from osdp.wrapping import applied_model, check_reuse

if TYPE_CHECKING:
    from osdp.device_info import DeviceInfo
    from osdp.integrations.token_step import Slicer
    from osdp.token_slices import TokenSlices


class OSDP(nn.Module):
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
        find_unused_parameters: Whether parameters may go without a gradient in a step.
        cache_dir: Where profiles are kept.

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
    _steps: Steps
    _optimizer_check: OptimizerCheck

    def __new__(cls, model: nn.Module, *args: Any, **options: Any) -> Any:
        """Inside fairscale's ``enable_wrap`` only mark ``model`` as a unit of decision and return it."""
        if marks_here(cls):
            return mark(model, options, _OPTIONS)
        return super().__new__(cls)

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
        find_unused_parameters: bool = False,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, OSDP):
            raise ValueError("the model is wrapped already: it is an OSDP; wrap the plain model once")
        check_unwrapped(model)
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
            "cache_dir": cache_dir,
        }
        options = with_marked_options(model, given, _DEFAULTS)
        chosen = options.pop("plan")
        check_reuse(chosen, options, _DEFAULTS)
        self._own(applied_model(model, chosen, options))

    def _own(self, applied: AppliedPlan | AppliedPipeline) -> None:
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
        self.__dict__["_optimizer_check"] = OptimizerCheck(applied.model.parameters(), applied.plan)
        self.training = applied.model.training

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh it runs on.

        ``model.mesh["dp"].get_local_rank()`` of ``model.mesh["dp"].size()`` says which batches are this
        rank's, whatever the layout, unless the mesh was given and has no axis of that name.
        """
        mesh: DeviceMesh = self._applied.mesh
        return mesh

    def train_step(
        self,
        inputs: Any,
        targets: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        token_slices: "int | Sequence[int] | TokenSlices | None" = None,
    ) -> torch.Tensor:
        """Forward and backward of one batch, whatever the layout; the mean loss over all ranks.

        The gradients left are those of the sum of all losses over all data-parallel ranks and microbatches,
        divided by the sum of their counts; an optimizer step and ``zero_grad`` follow.

        Args:
            inputs: What the model's forward takes for all samples of this data-parallel rank: a tensor, a
                tuple (positional) or a mapping (keywords), split along dim 0. All ranks of a pipeline, and
                all that compute a layer together, pass the same.
            targets: Passed to ``loss_fn`` beside the output, split alike; ``None``: only the output is.
            loss_fn: Returns (sum, count), or one number that is the mean over samples. Without it the loss is
                the output's own ``loss``, which counts as a mean over samples.
            num_microbatches: Parts of the batch, as planned if ``None``.
            schedule: Another schedule than the plan's, of as many stages for each rank.
            token_slices: How many slices each sequence is cut into, or their lengths; as planned if ``None``.
                For causal decoders of transformers, with ``"gpipe"`` or ``"1f1b"`` and a loss that is a pair
                of sums over positions; :func:`osdp.integrations.huggingface.causal_lm_loss` shifts before.

        Returns:
            The loss, a scalar, on every rank.

        Raises:
            RuntimeError: There are gradients of an earlier step.
            ValueError: The batch is smaller than ``num_microbatches``, differs between ranks that share it,
                or the schedule cannot run; or sequences cannot be cut so.
        """
        self._optimizer_check.end_if_accepted()
        slicing = None
        if token_slices is None and isinstance(self.plan, PipelinePlan):
            token_slices = self.plan.token_slices
        if token_slices is not None:
            inputs = self._slicer.named(inputs)
            slicing = self._slicer.slicing(inputs, token_slices)
            loss_fn, targets = self._slicer.loss(loss_fn, targets, slicing.slices.sequence_length)
        return self._steps.train_step(
            inputs, targets, loss_fn, num_microbatches=num_microbatches, schedule=schedule, slicing=slicing
        )

    @cached_property
    def _slicer(self) -> "Slicer":
        # Needs transformers, which nothing else here does.
        from osdp.integrations.token_step import Slicer

        tensor = self.plan.tensor if isinstance(self.plan, PipelinePlan) else None
        shared = self.plan.tp if tensor is not None and tensor.sequence is not None else 1  # type: ignore[union-attr]
        return Slicer(self.module, shared)

    def eval_step(
        self,
        inputs: Any,
        targets: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        num_microbatches: int | None = None,
    ) -> torch.Tensor:
        """The mean loss of a batch over all ranks, on every rank, without gradients; as :meth:`train_step`.

        Modules stay in the mode they are in: call ``model.eval()`` before.
        """
        return self._steps.eval_step(inputs, targets, loss_fn, num_microbatches=num_microbatches)

    def predict(self, inputs: Any, *, num_microbatches: int | None = None) -> Any:
        """The model's outputs for ``inputs``, forward only, on all ranks that were given them.

        What is not there on the last stage, such as hidden states of earlier ones, is ``None``. Of several
        microbatches single numbers are averaged over the samples, and what cannot be joined, such as a cache,
        is ``None``.
        """
        return self._steps.predict(inputs, num_microbatches=num_microbatches)

    def generate(
        self,
        prompt: torch.Tensor,
        max_new_tokens: int,
        *,
        attention_mask: torch.Tensor | None = None,
        num_microbatches: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        **sampling: Any,
    ) -> torch.Tensor:
        """Prompts and what the model says after them, whatever the layout; greedy as transformers has it.

        Prompts go through the stages in groups, so that all stages work. Modules stay in the mode they are
        in: call ``model.eval()`` before.

        Args:
            prompt: Tokens of shape ``(samples, length)``, those of this data-parallel rank; all ranks of a
                pipeline pass the same. Data-parallel ranks have as many samples, and ask for as many tokens.
            max_new_tokens: How many tokens to add at most.
            attention_mask: 0 where the prompt is padding, which comes first; of the shape of ``prompt``.
            num_microbatches: Groups of prompts; one for each stage if ``None``.
            eos_token_id: What ends a sequence, as the model is configured if ``None``; ``()``: nothing does.
            pad_token_id: What comes after that, likewise.
            sampling: ``do_sample``, ``temperature``, ``top_k``, ``top_p`` and ``generator`` of
                :class:`osdp.runtime.generation.Choice`.

        Returns:
            Tokens of shape ``(samples, length + at most max_new_tokens)``, until all sequences have ended.

        Raises:
            ValueError: The model has no cache, padding comes last, or the model has too few positions.
        """
        request = self._slicer.request(prompt, max_new_tokens, attention_mask)
        choice = self._slicer.choice(eos_token_id, pad_token_id, sampling)
        return self._steps.generate(choice=choice, num_groups=num_microbatches, **request)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns.

        Raises:
            RuntimeError: It is cut into stages, of which this rank has only some.
        """
        self._optimizer_check.end_if_accepted()
        return self._applied.forward(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside keep their gradients; the first one outside reduces them all.

        ``plan.reduce_each_microbatch`` says which way the plan was priced: if it is false, run all
        microbatches but the last in here; if it is true, keeping gradients takes more memory than planned.
        """
        context: AbstractContextManager[None] = self._applied.no_sync()
        return context

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether the next backwards reduce gradients, or keep them for one that does."""
        self._applied.set_requires_gradient_sync(requires_gradient_sync)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their joint norm is at most ``max_norm``; the norm before."""
        norm: torch.Tensor = self._applied.clip_grad_norm_(max_norm, norm_type)
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
        """Load what :meth:`state_dict` gave under the same plan.

        What another plan saved, or no plan, is loaded by :mod:`osdp.runtime.checkpoint`.

        Raises:
            ValueError: ``assign`` is set.
        """
        if assign:
            raise ValueError(
                "assign=True would replace the parameters that the optimizer and the shards refer to; "
                "load with assign=False, which copies into them"
            )
        return self.module.load_state_dict(state_dict, strict)

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

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "OSDP":
        for dtype, device in {(p.dtype, p.device) for p in self.parameters()}:
            before = torch.empty(0, dtype=dtype, device=device)
            after = fn(before)
            if after.device == device_of(self._applied.mesh) and after.dtype == before.dtype:
                # What lives in host memory stays there.
                continue
            if after.device != before.device or after.dtype != before.dtype:
                raise RuntimeError(
                    f"an OSDP model cannot be moved from {before.device} {before.dtype} to {after.device} "
                    f"{after.dtype}: its shards belong to the devices and dtypes of the plan; convert the "
                    "plain model before wrapping it, or pass param_dtype="
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            "an OSDP model cannot be copied: its shards and hooks belong to one set of process groups; copy "
            "the plain model before wrapping it, or use state dicts"
        )


#: What a caller can choose; fairscale's ``enable_wrap`` may be given them too.
_OPTIONS = tuple(inspect.signature(OSDP.__init__).parameters)[2:]

#: Their values where nothing is chosen.
_DEFAULTS = {name: inspect.signature(OSDP.__init__).parameters[name].default for name in _OPTIONS}

#: The long name, as in the paper's code.
OptimalShardedDataParallel = OSDP
