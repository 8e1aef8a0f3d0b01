"""``apply``: run a model under a plan; and what every model that runs under one can do."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.allocator import keep_freed_memory
from osdp.plan.plan import Plan
from osdp.plan.schedule import Schedule
from osdp.runtime.computation import Computation
from osdp.runtime.mesh import data_parallel_mesh, parallel_mesh
from osdp.runtime.pipeline.apply import apply_pipeline
from osdp.runtime.sharding.apply import apply_sharding
from osdp.runtime.sharding.backward_pass import Backwards
from osdp.runtime.sharding.sharded_model import ShardedModel
from osdp.runtime.stages import ParameterStore, RunningStage, StageLinks


class RunningModel(ParameterStore, Protocol):
    """A model under a plan: a :class:`ShardedModel`, or a ``PipelinedModel`` if it is cut.

    Attributes:
        model: The model, changed in place.
        plan: The plan.
        mesh: The mesh it runs on: of data-parallel ranks, or with the axes pp, dp and tp.
        data_group: The data-parallel ranks of a stage.
        links: What connects its stages.
    """

    plan: Plan
    mesh: DeviceMesh
    data_group: dist.ProcessGroup
    links: StageLinks

    @property
    def stages(self) -> Mapping[int, RunningStage]:
        """The stages of this rank, by index."""
        ...

    @property
    def sharded(self) -> ShardedModel:
        """The model as FSDP2's methods apply to it.

        Raises:
            RuntimeError: The model is cut.
        """
        ...

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward ran with gradients, and no backward has reached the model since."""
        ...

    def make_schedule(self, num_microbatches: int | None, name: str | None, num_slices: int) -> Schedule:
        """The schedule of a step.

        Args:
            num_microbatches: Number of microbatches; as planned if ``None``.
            name: Name of the schedule; as planned if ``None``.
            num_slices: Number of slices of each sequence.

        Raises:
            ValueError: There is no such schedule, or it cannot run.
        """
        ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output.

        Raises:
            RuntimeError: The model is cut into several stages.
        """
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate without reductions: backwards inside keep their gradients for the first one outside.

        Raises:
            RuntimeError: The model is cut.
        """
        ...

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; returns the norm before."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """Load a plain state dict of the whole model, or what ``state_dict`` gave; all ranks call it."""
        ...

    def train(self, mode: bool) -> None:
        """Set the training mode."""
        ...

    def settle(self) -> None:
        """Register the stored parameters, for in-place changes after a forward that gets no backward."""
        ...


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh | None = None,
    *,
    find_unused_parameters: bool = True,
    double_backward: bool = False,
    computation: Computation | None = None,
) -> RunningModel:
    """Run ``model`` under ``plan``, changing it in place.

    A collective call: every rank makes it. A model on a real device starts from rank 0's parameters and
    buffers on all ranks; one built on ``meta`` is initialised block by block from rank 0's seed, so that no
    rank ever holds the whole model.

    Args:
        model: The plain model; of a model that is cut it keeps the modules of this rank's stages.
        plan: A plan that was made for it.
        mesh: A mesh with one axis, or if the model is cut with the axes ``pp``, ``dp`` and ``tp``; one over
            all ranks if ``None``. For a model that was parallelized by hand, the data-parallel axis of the
            mesh that it was parallelized on.
        find_unused_parameters: Whether parameters may go without a gradient, which costs a small all-reduce
            after each backward that reduces if anything is sharded; otherwise such a parameter is an error.
        double_backward: Whether a backward may itself be differentiated.
        computation: How it computes beside the plan; as planned if ``None``.

    Returns:
        The handle through which the model is trained.

    Raises:
        RuntimeError: There is no process group, or this torch cannot reduce unused sharded parameters.
        ValueError: The model is wrapped already, partly on ``meta``, or cannot initialise itself; or it is
            cut, and an option does not go with stages.
        PlanMismatchError: The plan is for another model or world size; lists every difference.
    """
    mesh = data_parallel_mesh(model, mesh) if plan.is_whole else mesh or parallel_mesh(model, plan.dims)
    if mesh.device_type == "cpu":
        keep_freed_memory()
    if plan.is_whole:
        return apply_sharding(
            model,
            plan,
            mesh,
            backwards=Backwards(find_unused_parameters, double_backward),
            computation=computation,
        )
    if computation not in (None, Computation()):
        raise ValueError(
            "output_dtype, cast_forward_inputs and param_init_fn are not for models that are cut, or shared "
            "by tensor-parallel ranks: leave them out"
        )
    check_model_parallel_options(
        find_unused_parameters=find_unused_parameters, double_backward=double_backward
    )
    return apply_pipeline(model, plan, mesh)


def check_model_parallel_options(*, find_unused_parameters: bool, double_backward: bool) -> None:
    """Check the options of backward for a model that is cut.

    Raises:
        ValueError: An option is not supported with stages.
    """
    if double_backward:
        raise ValueError("double_backward does not go with stages, which run their backwards apart")
    if not find_unused_parameters:
        raise ValueError(
            "find_unused_parameters=False is not for stages: they allow parameters without a gradient; "
            "leave the option out"
        )
