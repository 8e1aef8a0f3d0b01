"""Strategies of Lightning, for its Trainer and for Fabric, whose checkpoints hold under every plan.

Lightning's own ``ModelParallelStrategy`` trains a model under a plan, but knows a distributed model by its
DTensors, of which a replicated plan has none, and so refuses to save or load it.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy as TrainerStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh

from osdp.comm.objects import broadcast_object, is_first
from osdp.integrations.data_parallel import require_data_parallel
from osdp.runtime.checkpoint import load, load_whole_state_dict, save
from osdp.runtime.checkpoint.contents import CheckpointContents
from osdp.runtime.checkpoint.kept import ONE_PART_ALONE, KeptState, has_dtensor
from osdp.runtime.ranks.shared_faults import raise_together
from osdp.wrapper import OSDP

#: The folder inside a checkpoint of Lightning, in which all of it is: one rename publishes it.
STATE_FOLDER = "osdp"
#: What is neither model nor optimizer, as bytes: it may be more than plain data, which the reader decides on.
_REST = "lightning"


class OSDPStrategy(TrainerStrategy):
    """Strategy of Lightning's Trainer; wrap the model in ``configure_model``, which is called more than once.

    ::

        class Module(lightning.LightningModule):
            def configure_model(self):
                if not isinstance(self.model, OSDP):
                    self.model = OSDP(self.model, batch, "40GiB", mesh=self.device_mesh["data_parallel"])

            def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, **_):
                if gradient_clip_val is not None:
                    self.model.clip_grad_norm_(gradient_clip_val)

        lightning.Trainer(strategy=OSDPStrategy(), gradient_clip_val=1.0)

    All ranks are data-parallel. Checkpoints are folders, which load on another number of ranks.

    Raises:
        ValueError: An option asks for checkpoints of another kind.
    """

    def __init__(self, **options: Any) -> None:
        _check_options(options)
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, **options)

    def setup_environment(self) -> None:
        """Make the mesh, over all ranks.

        Raises:
            ValueError: A callback averages weights in a copy of the module, or ``sync_batchnorm`` is set.
        """
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True converts layers when a strategy is set up, and by then they are under a "
                "plan: leave it out, and convert the plain model in configure_model, before wrapping, by "
                "nn.SyncBatchNorm.convert_sync_batchnorm(model)"
            )
        assert self.lightning_module is not None  # it is connected before
        trainer: Any = self.lightning_module.trainer  # its stubs leave out the callbacks
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging):
                raise ValueError(
                    "StochasticWeightAveraging averages into a copy of the plain module, whose weights are "
                    "not sharded: leave it out, and keep an average of model.parameters(), which are, by "
                    "torch's get_swa_multi_avg_fn or get_ema_multi_avg_fn"
                )
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Set up the model, which ``configure_model`` has wrapped.

        Raises:
            ValueError: Parameters that are to be trained are in no wrapped model, or its plan is not for the
                Trainer's ranks.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            _check_wrapped(self._lightning_model, self.num_nodes * self.num_processes)
        super().setup(trainer)

    def block_backward_sync(self) -> Any:
        """Inside, gradients are kept, for the last microbatch of a step to reduce, if that was planned."""
        return _keeping_gradients(self._lightning_model)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any
    ) -> Any:
        """Step; another plan is switched to before, where one is refined, since forwards run inside.

        Lightning drops the gradients of the last step behind the next forward. No plan has memory for them
        there, so they are dropped first, unless the module does that itself or looks at them.
        """
        for wrapped in _wrapped_in(self._lightning_model):
            wrapped.begin_step(follows_plan=True)
        module: Any = self._lightning_model
        looks = [module, *module.trainer.callbacks]
        kept = is_overridden("optimizer_zero_grad", module)
        kept |= any(is_overridden("on_before_zero_grad", each) for each in looks)
        if module.automatic_optimization and module.trainer.accumulate_grad_batches == 1 and not kept:
            optimizer.zero_grad()
        return super().optimizer_step(optimizer, closure, model, **options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: :meth:`save_checkpoint` saves the model by its shards."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing, likewise."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write the folder ``filepath``.

        Raises:
            ValueError: There are storage options, or a callback has put weights into the checkpoint, or
                sharded tensors.
        """
        if checkpoint.get("state_dict"):
            raise ValueError(
                "a callback or hook has put weights into the checkpoint's state_dict, which is written by "
                "shards from the model itself: keep other weights under another name, as whole tensors"
            )
        rest = {
            key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")
        }
        # Where weights alone are asked for there are none, as in a model that is not trained.
        optimizers = _bare(self.optimizers) if checkpoint.get("optimizer_states") else []
        _save(filepath, self._lightning_model, optimizers, rest, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read what :meth:`save_checkpoint` wrote."""
        assert self.lightning_module is not None  # there are no checkpoints before
        folder, rest = _read_rest(checkpoint_path, weights_only)
        is_trained = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        load(folder, self.lightning_module, _bare(self.optimizers) if is_trained else [])
        return rest

    @property
    def _lightning_model(self) -> nn.Module:
        assert self.lightning_module is not None  # there are no checkpoints before
        return self.lightning_module


class OSDPFabricStrategy(FabricStrategy):
    """Strategy of Fabric; ``parallelize_fn`` wraps the model.

    ::

        strategy = OSDPFabricStrategy(lambda model, mesh: OSDP(model, batch, "40GiB", mesh=mesh))
        fabric = lightning.Fabric(strategy=strategy)

    All ranks are data-parallel. ``fabric.save`` writes a folder, which loads on another number of ranks.

    Args:
        parallelize_fn: Wraps a model on a mesh of all ranks.
        **options: Those of Lightning's strategy, but for degrees.

    Raises:
        ValueError: An option asks for checkpoints of another kind.
    """

    def __init__(self, parallelize_fn: Callable[[nn.Module, DeviceMesh], OSDP], **options: Any) -> None:
        _check_options(options)
        super().__init__(
            lambda model, mesh: parallelize_fn(model, mesh["data_parallel"]),
            data_parallel_size=1,
            tensor_parallel_size=1,
            **options,
        )
        self._backward_sync_control = _BackwardSync()  # type: ignore[assignment]  # it only is called

    def setup_environment(self) -> None:
        """Make the mesh, over all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap ``module``.

        Raises:
            ValueError: Parameters that are to be trained are in no wrapped model, or its plan is not for
                Fabric's ranks.
        """
        found = super().setup_module(module)
        _check_wrapped(found, self.num_nodes * self.num_processes)
        return found

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Write the folder ``path``: one model, its optimizers if there are some, and the rest of ``state``.

        Raises:
            ValueError: There is not one model, or a filter, or sharded tensors beside the model.
        """
        if filter is not None:
            raise ValueError("filter= is not for checkpoints by shards: leave entries out of state")
        model, optimizers, rest = _parts(state)
        values = {key: v.state_dict() if hasattr(v, "state_dict") else v for key, v in rest.items()}
        _save(path, model, optimizers, values, storage_options)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read what :meth:`save_checkpoint` wrote into ``state``; returns what ``state`` does not name.

        Raises:
            ValueError: ``state`` has not one model; or ``strict``, and the checkpoint lacks an entry of it.
                Nothing was changed.
        """
        if isinstance(state, nn.Module) and broadcast_object(Path(path).is_file()):
            _load_raw(path, state, strict, weights_only is not False)
            return {}
        model, optimizers, rest = _parts(state if isinstance(state, dict) else {"model": state})
        folder, found = _read_rest(path, weights_only)
        missing = sorted(rest.keys() - found.keys())
        if missing and strict:
            raise ValueError(f"{path} has no {', '.join(missing)}: leave them out, or pass strict=False")
        load(folder, model, optimizers)
        for key in rest.keys() & found.keys():
            value = found.pop(key)
            if hasattr(rest[key], "load_state_dict"):
                rest[key].load_state_dict(value)
            else:
                state[key] = value
        return found


def _load_raw(path: str | Path, model: nn.Module, strict: bool, weights_only: bool) -> None:
    """``Fabric.load_raw``: load a plain state dict, which rank 0 reads for all."""
    plain, fault = None, None
    try:
        plain = torch.load(path, map_location="cpu", weights_only=weights_only) if is_first() else None
    except Exception as error:  # the other ranks wait for it
        fault = error
    raise_together(fault)
    load_whole_state_dict(model, plain, strict=strict)


def _parts(state: Mapping[str, Any]) -> tuple[nn.Module, list[torch.optim.Optimizer], dict[str, Any]]:
    """The model of a state, its optimizers, and the rest."""
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    if len(models) != 1:
        raise ValueError(f"a checkpoint is one of one model, and this state has {len(models)}")
    rest = {
        key: value for key, value in state.items() if not isinstance(value, nn.Module | torch.optim.Optimizer)
    }
    return models[0], _bare(optimizers), rest


def _bare(optimizers: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers inside Lightning's."""
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]


def _check_options(options: Mapping[str, Any]) -> None:
    if not options.get("save_distributed_checkpoint", True):
        raise ValueError(
            "save_distributed_checkpoint=False: checkpoints are saved by shards; "
            "osdp.runtime.checkpoint.export makes one file of them"
        )


def _wrapped_in(module: nn.Module) -> list[OSDP]:
    return [part for part in module.modules() if isinstance(part, OSDP)]


@contextmanager
def _keeping_gradients(module: nn.Module) -> Iterator[None]:
    """Inside, gradients are kept, for the last microbatch of a step to reduce, if that was planned."""
    with ExitStack() as kept:
        for model in _wrapped_in(module):
            if not model.plan.reduce_each_microbatch:
                kept.enter_context(model.no_sync())
        yield


class _BackwardSync:
    """Fabric's ``no_backward_sync``; Lightning's own leaves reductions off behind the last microbatch."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Inside, gradients are kept if ``enabled``, and if that was planned."""
        return _keeping_gradients(module) if enabled else nullcontext()


def _check_wrapped(module: nn.Module, num_processes: int) -> None:
    """Refuse parameters outside wrapped models, whose gradients nobody reduces, and plans of other ranks."""
    models = _wrapped_in(module)
    for model in models:
        require_data_parallel(model, num_processes, "Lightning")
    inside = {id(parameter) for model in models for parameter in model.module.parameters()}
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    loose = [name for name, parameter in trained.items() if id(parameter) not in inside]
    if loose:
        raise ValueError(
            f"{len(loose)} parameters are in no OSDP model, the first is {loose[0]!r}: their gradients would "
            "not be reduced over the ranks, whose copies would drift apart. Wrap a module that has them all, "
            "or freeze them"
        )


def _save(
    path: str | Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    rest: Mapping[str, Any],
    storage_options: Any,
) -> None:
    if storage_options is not None:
        raise ValueError(
            "storage_options= is not for checkpoints by shards, which are folders of a file system"
        )
    folder = Path(broadcast_object(str(path))) / STATE_FOLDER
    file = io.BytesIO()
    fault: Exception | None = None
    try:
        if sharded := [name for name, value in rest.items() if has_dtensor(value)]:
            raise ValueError(f"{sharded[0]} {ONE_PART_ALONE}")
        torch.save(dict(rest), file)
    except Exception as error:  # of what cannot be pickled, whatever it raises; the other ranks wait
        fault = error
    raise_together(fault, f"{folder} has what it had before")
    save(
        folder,
        model,
        optimizers,
        extra={_REST: torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)},
    )


def _read_rest(path: str | Path, weights_only: bool | None) -> tuple[Path, dict[str, Any]]:
    """The folder of a checkpoint, and what Lightning saved in it, before anything is loaded."""
    folder = Path(broadcast_object(str(path))) / STATE_FOLDER
    contents = CheckpointContents(Metadata({}), None, "")
    fault: Exception | None = None
    try:
        contents = CheckpointContents.read(folder)
    except (OSError, ValueError) as error:
        fault = error
    raise_together(fault)
    extra = KeptState.read(folder, contents).plain.get("extra")
    if not isinstance(extra, dict) or _REST not in extra:
        raise ValueError(f"{folder} has model and optimizer, but nothing that Lightning saved with them")
    found: dict[str, Any] = {}
    try:
        file = io.BytesIO(extra[_REST].numpy().tobytes())
        found = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
    except Exception as error:  # whatever the bytes lead to
        fault = ValueError(f"what Lightning saved in {folder} cannot be read: {error}")
    raise_together(fault)
    return folder, found
