"""``OSDPAccelerator``: Hugging Face's Accelerator that leaves a model under a plan as it is.

Accelerate itself would wrap such a model in DDP; here preparing it only registers it, and what Accelerate
does with registered models and their optimizers (clipping, saving and loading state) is done by the model.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from osdp.comm.objects import broadcast_object
from osdp.integrations.data_parallel import require_data_parallel
from osdp.runtime.checkpoint import load, save, whole_state_dict
from osdp.runtime.checkpoint.kept import ONE_PART_ALONE, has_dtensor
from osdp.runtime.module.replaced import Replaced
from osdp.runtime.ranks.shared_faults import raise_together
from osdp.wrapper import OSDP

#: Ways of Accelerate to shard a model itself.
_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class OSDPAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """An Accelerator for models that are wrapped by :class:`osdp.OSDP`.

    ::

        accelerator = OSDPAccelerator(gradient_accumulation_steps=4)
        model = OSDP(model, sample_batch, "40GiB")
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    ``accumulate``, ``backward``, ``clip_grad_norm_``, ``save_state``, ``load_state`` and ``get_state_dict``
    then work under every plan, and states load on another number of ranks. Other models are prepared as
    usual.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]
    #: Of a save that is under way.
    _meeting: "_Meeting | None" = None

    @property
    def _wrapped(self) -> list[OSDP]:
        """The prepared models that are under a plan."""
        return list(dict.fromkeys(model for model in self._models if isinstance(model, OSDP)))

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare what is given; see :meth:`prepare_model`.

        Raises:
            ValueError: There is a model under a plan, and Accelerate is told to shard models in its own way;
                or it was compiled as a whole.
        """
        planned = [each for each in args if isinstance(getattr(each, "_orig_mod", each), OSDP)]
        if any(not isinstance(each, OSDP) for each in planned):
            raise ValueError(
                "a compiled model under a plan cannot be prepared: prepare it as OSDP returned it, and "
                "compile its blocks before wrapping, block.compile()"
            )
        if self.distributed_type in _SHARDING and planned:
            raise ValueError(
                f"the model is sharded by OSDP, and this Accelerator is to shard it by "
                f"{self.distributed_type.value}: leave that out of its plugins, or of the configuration of "
                "accelerate launch"
            )
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Register ``model``; one under a plan is neither moved nor wrapped.

        Raises:
            ValueError: Its ranks are not those that Accelerate gives batches to.
        """
        if not isinstance(model, OSDP):
            plain: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return plain
        require_data_parallel(model, self.num_processes, "Accelerate")
        follow_reductions(self, model)
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clip the gradients of a prepared model, over all ranks; returns their norm before.

        Raises:
            ValueError: ``parameters`` lack some of a model under a plan that are trained, or have others too.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        identities = {id(parameter) for parameter in given}
        for model in self._wrapped:
            own = {id(parameter) for parameter in model.parameters()}
            if not identities & own:
                continue
            trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
            if trained <= identities <= own:
                self.unscale_gradients()
                return model.clip_grad_norm_(max_norm, norm_type)
            others = len(identities - own)
            raise ValueError(
                f"{len(identities & own)} of the {len(own)} parameters of a model under a plan are to be "
                f"clipped{f' together with {others} others' if others else ''}: pass model.parameters(), of "
                "all of them and of it alone"
            )
        return super().clip_grad_norm_(given, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state dict on the CPU of rank 0; of a model under a plan it is empty on other ranks."""
        inner = getattr(model, "_orig_mod", model)  # it may be compiled
        if isinstance(inner, OSDP):
            return whole_state_dict(inner)
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save what is prepared and registered; models under a plan with their optimizers, by shards.

        Raises:
            RuntimeError: A rank could not write; raised on all ranks.
            ValueError: What is registered has sharded tensors, such as an average of a model's weights.
        """
        for each in self._custom_objects:
            if has_dtensor(each.state_dict()):
                raise ValueError(
                    f"{type(each).__name__}, which is registered for checkpointing, {ONE_PART_ALONE}"
                )
        found: Any = None
        iteration = self.project_configuration.iteration
        meeting = self._meeting = _Meeting()
        try:
            with self._apart():
                found = super().save_state(output_dir, *args, **kwargs)
            meeting.meet()
        except Exception as error:  # of whatever is registered; the other ranks wait in any case
            # Where nothing failed it was counted, and names the next folder.
            self.project_configuration.iteration = iteration
            if not meeting.was_told:
                meeting.meet(error)
            raise
        finally:
            self._meeting = None
        return found

    def wait_for_everyone(self) -> None:
        """Wait for all ranks; while a state is saved, also for what went wrong on one of them."""
        if self._meeting is None:
            super().wait_for_everyone()
        else:
            self._meeting.meet()

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """As in Accelerate; with models under a plan it has no effect, as with those of FSDP, and says so."""
        if any(isinstance(each, OSDP) for each in joinables):
            warnings.warn(
                "join_uneven_inputs has no effect on a model under a plan, whose ranks step together: give "
                "all ranks as many batches",
                stacklevel=3,
            )
            yield
            return
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load what :meth:`save_state` wrote, on any number of ranks."""
        with self._apart():
            found = super().load_state(input_dir, *args, **kwargs)
        # Of a rank that was not there when it was saved there is no file.
        self.step: int = broadcast_object(self.step)
        return found

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, Accelerate sees no model under a plan: hooks save and load these and their optimizers."""
        models, optimizers = self._models, self._optimizers
        pairs = self._pairs()
        mine = [optimizer for _, optimizers in pairs for optimizer in optimizers]
        # The folder is known when Accelerate calls the hooks.
        handles = [
            self.register_save_state_pre_hook(lambda _models, _weights, folder: self._save(folder, pairs)),
            self.register_load_state_pre_hook(lambda _models, folder: _each(load, folder, pairs)),
        ]
        self._models = [model for model in models if not isinstance(model, OSDP)]
        self._optimizers = [each for each in optimizers if not any(_bare(each) is own for own in mine)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            for handle in handles:
                handle.remove()

    def _save(self, folder: str, pairs: Iterable[tuple[OSDP, list[torch.optim.Optimizer]]]) -> None:
        self.wait_for_everyone()
        _each(save, folder, pairs)

    def _pairs(self) -> list[tuple[OSDP, list[torch.optim.Optimizer]]]:
        """Models under a plan, each with the optimizers of its parameters; frozen ones have none."""
        found: list[tuple[OSDP, list[torch.optim.Optimizer]]] = []
        for bare in map(_bare, self._optimizers):
            Replaced().exchange_in(bare)  # it may have been made before the model was wrapped
        for model in self._wrapped:
            own = {id(parameter) for parameter in model.parameters()}
            mine = [
                bare
                for bare in map(_bare, self._optimizers)
                if own & {id(parameter) for group in bare.param_groups for parameter in group["params"]}
            ]
            trained = any(parameter.requires_grad for parameter in model.parameters())
            stepped = [id(p) for bare in mine for group in bare.param_groups for p in group["params"]]
            if (trained and not mine) or len(stepped) > len(set(stepped)):
                raise ValueError(
                    f"a model under a plan is saved with its optimizers, and {len(mine)} optimizers have "
                    f"parameters of it{' in common' * (len(mine) > 1)}: prepare the model with one optimizer "
                    "of all its parameters, or several of some each; or freeze it by requires_grad_(False), "
                    "if it is not trained"
                )
            found.append((model, mine))
        return found


class _Meeting:
    """Where ranks that save a state wait for one another: one that failed tells the others at the next one.

    Attributes:
        was_told: Whether this rank was told, so that the others know as well.
    """

    def __init__(self) -> None:
        self.was_told = False

    def meet(self, fault: Exception | None = None) -> None:
        """Wait for all ranks, each with the ``fault`` that it has found, if any.

        Raises:
            RuntimeError: There is one; raised on all ranks.
        """
        try:
            raise_together(fault)
        except Exception:
            self.was_told = True
            raise


def follow_reductions(accelerator: Accelerator, model: OSDP) -> None:
    """Let ``accelerator`` reduce gradients after each microbatch, or once a step, as planned."""
    if model.plan.training.microbatches > 1:
        options = accelerator.gradient_state.plugin_kwargs
        options["sync_each_batch"] = model.plan.reduce_each_microbatch


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _each(
    action: Callable[[Path, OSDP, list[torch.optim.Optimizer]], object],
    folder: str,
    pairs: Iterable[tuple[OSDP, list[torch.optim.Optimizer]]],
) -> None:
    for index, (model, optimizers) in enumerate(pairs):
        action(Path(folder) / f"osdp_{index}", model, optimizers)
