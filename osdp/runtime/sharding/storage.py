"""How each parameter of a model is stored under its sharding plan, resolved once."""

from dataclasses import dataclass

from torch import nn

from osdp.nn.modules import keeps_dtype
from osdp.plan.sharding import Mode, Route, ShardingPlan
from osdp.runtime.sharding.sliced import sharded_weights


@dataclass(frozen=True)
class ParameterStorage:
    """A sharding plan joined with the parameters of a model; those that are not listed are replicated.

    Attributes:
        in_shards: Parameters that FSDP2 shards, each with the index of its unit in
            ``ShardingPlan.fsdp_units``. Those without elements are replicated: FSDP2 cannot reduce them, and
            they cost nothing.
        in_slices: Sharded weights of operators in slices, with the dimension each is sharded along.
        stepped_in_shards: Replicated parameters of which optimizers see a shard (``SHARD_OPTIMIZER``), each
            with the route of its gradient.
        offloaded: Sharded parameters that are kept in host memory.
        in_own_dtype: Replicated parameters that are computed in their own dtype, whatever the plan's.
    """

    in_shards: dict[str, int]
    in_slices: dict[str, int]
    stepped_in_shards: dict[str, Route]
    offloaded: frozenset[str]
    in_own_dtype: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, plan: ShardingPlan, param_dtype: str | None) -> "ParameterStorage":
        """How ``model`` is stored under ``plan``, which fits it, and computed in ``param_dtype``."""
        empty = {name for name, parameter in model.named_parameters() if not parameter.numel()}
        own = frozenset(
            f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            if param_dtype is not None and keeps_dtype(module)
            for key, _ in module.named_parameters(recurse=False)
        )
        whole = empty | own
        return cls(
            in_shards={
                name: index
                for index, unit in enumerate(plan.fsdp_units)
                for name in plan.parameters_of(unit)
                if name not in whole
            },
            in_slices=sharded_weights(model, plan),
            stepped_in_shards={
                name: unit.route
                for unit in plan.units
                if unit.mode is Mode.SHARD_OPTIMIZER
                for name in plan.parameters_of(unit)
                if name not in whole
            },
            offloaded=frozenset(
                name for unit in plan.units if unit.offloaded for name in plan.parameters_of(unit)
            )
            - whole,
            in_own_dtype=own,
        )

    def is_replicated(self, name: str) -> bool:
        """Whether every rank holds the whole parameter."""
        return name not in self.in_shards and name not in self.in_slices

    @property
    def shards_any(self) -> bool:
        """Whether any parameter is sharded."""
        return bool(self.in_shards or self.in_slices)

    @property
    def has_dtensors(self) -> bool:
        """Whether optimizers see shards of any parameter, and then DTensors of all."""
        return self.shards_any or bool(self.stepped_in_shards)
