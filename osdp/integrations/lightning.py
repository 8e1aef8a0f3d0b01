"""Strategies of Lightning, for its Trainer and for Fabric, whose checkpoints hold under every plan.

Lightning's own ``ModelParallelStrategy`` trains a model under a plan, but knows a distributed model by its
DTensors, of which a replicated plan has none, and so refuses to save or load it.
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy as TrainerStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.comm.objects import broadcast_object
from osdp.runtime.checkpoint import load, save
from osdp.wrapper import OSDP

#: The folder inside a checkpoint of Lightning, in which all of it is: one rename publishes it.
STATE_FOLDER = "osdp"
#: What is neither model nor optimizer, as bytes: it may be more than plain data, which the reader decides on.
_REST = "lightning"


class OSDPStrategy(TrainerStrategy):
    """Strategy of Lightning's Trainer; wrap the model in ``configure_model``.

    ::

        class Module(lightning.LightningModule):
            def configure_model(self):
                self.model = OSDP(self.model, batch, "40GiB", mesh=self.device_mesh["data_parallel"])

            def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, **_):
                self.model.clip_grad_norm_(gradient_clip_val)

        lightning.Trainer(strategy=OSDPStrategy(), gradient_clip_val=1.0)

    All ranks are data-parallel. Checkpoints are folders, which load on another number of ranks.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, **options)

    def setup_environment(self) -> None:
        """Make the mesh, over all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

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
            ValueError: There are several optimizers, or storage options.
        """
        rest = {
            key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")
        }
        _save(filepath, self._lightning_model, self._one_optimizer, rest, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read what :meth:`save_checkpoint` wrote."""
        optimizer = self._one_optimizer if self.optimizers else None
        return _load(checkpoint_path, self._lightning_model, optimizer, weights_only)

    @property
    def _lightning_model(self) -> nn.Module:
        assert self.lightning_module is not None  # there are no checkpoints before
        return self.lightning_module

    @property
    def _one_optimizer(self) -> torch.optim.Optimizer:
        return _only(self.optimizers)


class OSDPFabricStrategy(FabricStrategy):
    """Strategy of Fabric; ``parallelize_fn`` wraps the model.

    ::

        strategy = OSDPFabricStrategy(lambda model, mesh: OSDP(model, batch, "40GiB", mesh=mesh))
        fabric = lightning.Fabric(strategy=strategy)

    All ranks are data-parallel. ``fabric.save`` writes a folder, which loads on another number of ranks.

    Args:
        parallelize_fn: Wraps a model on a mesh of all ranks.
    """

    def __init__(self, parallelize_fn: Callable[[nn.Module, DeviceMesh], OSDP], **options: Any) -> None:
        super().__init__(
            lambda model, mesh: parallelize_fn(model, mesh["data_parallel"]),
            data_parallel_size=1,
            tensor_parallel_size=1,
            **options,
        )

    def setup_environment(self) -> None:
        """Make the mesh, over all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Write the folder ``path``: one model, its optimizer if it is there, and what else ``state`` has.

        Raises:
            ValueError: There is not one model, or several optimizers, or a filter.
        """
        if filter is not None:
            raise ValueError("filter= is not for checkpoints by shards: leave entries out of state")
        model, optimizer, rest = _parts(state)
        values = {key: v.state_dict() if hasattr(v, "state_dict") else v for key, v in rest.items()}
        _save(path, model, optimizer, values, storage_options)

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
        """
        model, optimizer, rest = _parts(state if isinstance(state, dict) else {"model": state})
        found = _load(path, model, optimizer, weights_only)
        missing = sorted(rest.keys() - found.keys())
        if missing and strict:
            raise ValueError(f"{path} has no {', '.join(missing)}: leave them out, or pass strict=False")
        for key in rest.keys() & found.keys():
            value = found.pop(key)
            if hasattr(rest[key], "load_state_dict"):
                rest[key].load_state_dict(value)
            else:
                state[key] = value
        return found


def _parts(
    state: Mapping[str, Any],
) -> tuple[nn.Module, torch.optim.Optimizer | None, dict[str, Any]]:
    """The model of a state, its optimizer, and the rest."""
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    if len(models) != 1:
        raise ValueError(f"a checkpoint is one of one model, and this state has {len(models)}")
    rest = {
        key: value for key, value in state.items() if not isinstance(value, nn.Module | torch.optim.Optimizer)
    }
    return models[0], _only(optimizers) if optimizers else None, rest


def _only(optimizers: list[Any]) -> torch.optim.Optimizer:
    if len(optimizers) != 1:
        raise ValueError(
            f"a model under a plan is saved with its optimizer, and there are {len(optimizers)}: use one "
            "with several parameter groups"
        )
    found: torch.optim.Optimizer = getattr(optimizers[0], "optimizer", optimizers[0])
    return found


def _save(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    rest: Mapping[str, Any],
    storage_options: Any,
) -> None:
    if storage_options is not None:
        raise ValueError(
            "storage_options= is not for checkpoints by shards, which are folders of a file system"
        )
    folder = Path(broadcast_object(str(path)))
    file = io.BytesIO()
    torch.save(dict(rest), file)
    save(
        folder / STATE_FOLDER,
        model,
        optimizer,
        extra={_REST: torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)},
    )


def _load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    weights_only: bool | None,
) -> dict[str, Any]:
    folder = Path(broadcast_object(str(path)))
    kept = load(folder / STATE_FOLDER, model, optimizer)
    if not isinstance(kept.extra, dict) or _REST not in kept.extra:
        raise ValueError(f"{folder} has model and optimizer, but nothing that Lightning saved with them")
    file = io.BytesIO(kept.extra[_REST].numpy().tobytes())
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
    return found
