"""Bytes and seconds of operators, as prefix sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from osdp.arrays import Floats
from osdp.cost.matrix_steps import state_bytes, step_of_matrices
from osdp.cost.sharding.shard_groups import ShardGroup
from osdp.cost.sharding.sliced_costs import SlicedCosts, cost_slices
from osdp.hardware.profile import OptimizerProfile
from osdp.model.description import DTYPE_BYTES, Operator, Parameter
from osdp.model.training import Training
from osdp.plan.shard_math import SMALL_SHARD, padded_numel, shard_numel


@dataclass(frozen=True, slots=True)
class OperatorCosts:
    """Prefix sums over a list of ``K`` operators, each of shape ``(K + 1,)``; bytes and seconds.

    ``*_sharded`` is one rank's share of a sharded operator, ``*_whole`` that of a replicated one;
    ``state_optimizer`` that of one whose optimizer states alone are sharded.
    """

    state_sharded: Floats
    state_whole: Floats
    state_optimizer: Floats
    shard: Floats
    unsharded: Floats
    cast: Floats  # shards in the dtype of compute, where they are stored in another
    gradient: Floats
    reduce_input: Floats
    gradient_sharded: Floats
    bucket: Floats
    gradient_whole: Floats
    low_precision: Floats
    local_sharded: Floats  # bytes an optimizer step updates
    local_whole: Floats
    matrices_sharded: Floats  # seconds of orthogonalizing matrices
    matrices_whole: Floats
    num_parameters: Floats
    num_trainable: Floats
    num_messages: Floats  # of those, the ones whose shards are sent by themselves after a step
    num_cast: Floats  # gradients that are reduced in another dtype than autograd makes them in
    copy_in: Floats
    cast_in: Floats  # not a prefix sum: shape (K,)
    added_as: Floats  # a gradient in the dtype of the sum it is added to; not a prefix sum: shape (K,)
    largest_gradient: Floats  # not a prefix sum: shape (K,)
    last_gradient: Floats  # not a prefix sum: shape (K,)
    world_size: int
    model_bytes: float  # trainable parameters of all operators of the model, these and others
    owners: int  # ranks that own matrices of the model
    accumulates: bool  # several microbatches
    temporary_sharded: Floats  # of the optimizer step; prefix sums if additive, else shape (K,)
    temporary_whole: Floats
    temporaries_add: bool
    optimizer: OptimizerProfile
    host_optimizer: OptimizerProfile | None
    slices: SlicedCosts
    shard_group: ShardGroup
    others: tuple["OperatorCosts", ...] = ()  # the same operators in the other shard groups

    @property
    def by_group(self) -> tuple["OperatorCosts", ...]:
        """Costs by index of the shard group."""
        return (self, *self.others)


def cost_operators(
    operators: Sequence[Operator],
    *,
    shard_groups: Sequence[ShardGroup],
    training: Training,
    optimizer: OptimizerProfile,
    device_kind: str,
    model_bytes: float,
    owners: int = 1,
    host_optimizer: OptimizerProfile | None = None,
) -> OperatorCosts:
    """Costs of each operator in each shard group."""
    first, *others = (
        _cost_in(
            operators, shard_group, training, optimizer, device_kind, model_bytes, owners, host_optimizer
        )
        for shard_group in shard_groups
    )
    return replace(first, others=tuple(others))


def _cost_in(
    operators: Sequence[Operator],
    shard_group: ShardGroup,
    training: Training,
    optimizer: OptimizerProfile,
    device_kind: str,
    model_bytes: float,
    owners: int,
    host_optimizer: OptimizerProfile | None,
) -> OperatorCosts:
    world_size = shard_group.num_shards
    columns: dict[str, Any] = {
        name: _prefix([column(op, world_size, _computed(op, training)) for op in operators])
        for name, column in _COLUMNS.items()
    }
    # [operators][trainable parameters]: bytes that one rank's optimizer step updates.
    locals_sharded = [[_shard_bytes(p, world_size) for p in _trainable(op)] for op in operators]
    locals_whole = [[p.nbytes for p in _trainable(op)] for op in operators]

    matrices = partial(_matrix_seconds, operators, training, optimizer, shard_group, model_bytes, owners)
    add = training.implementation(device_kind) != "for-loop"
    return OperatorCosts(
        **columns,
        state_sharded=_prefix(list(map(partial(_state, training, world_size), operators, locals_sharded))),
        state_whole=_prefix(list(map(partial(_state, training, 1), operators, locals_whole))),
        # Whole parameters with the states of one shard.
        state_optimizer=_prefix(list(map(partial(_state, training, 1), operators, locals_sharded))),
        local_sharded=_prefix([sum(sizes) for sizes in locals_sharded]),
        local_whole=_prefix([sum(sizes) for sizes in locals_whole]),
        matrices_sharded=matrices(in_shards=True),
        matrices_whole=matrices(in_shards=False),
        optimizer=optimizer,
        host_optimizer=host_optimizer,
        copy_in=_prefix(
            [_copy_in(op, world_size, training) if device_kind == "cpu" else 0 for op in operators]
        ),
        cast_in=np.array(
            [_cast_in(op, world_size, training) if device_kind == "cpu" else 0 for op in operators],
            dtype=float,
        ),
        added_as=np.array(
            [_added_as(op, training) if device_kind == "cpu" else 0 for op in operators], dtype=float
        ),
        largest_gradient=np.array(
            [max(gradients_at_once(op, training).values(), default=0) for op in operators], dtype=float
        ),
        last_gradient=np.array(
            [[0, *gradients_by_parameter(op, training)][-1] for op in operators], dtype=float
        ),
        world_size=world_size,
        model_bytes=model_bytes,
        owners=owners,
        accumulates=training.microbatches > 1,
        temporary_sharded=_temporaries(locals_sharded, training, device_kind, add),
        temporary_whole=_temporaries(locals_whole, training, device_kind, add),
        temporaries_add=add,
        slices=cost_slices(operators, world_size=world_size, training=training),
        shard_group=shard_group,
    )


def over_group(
    costs: OperatorCosts, operators: Sequence[Operator], training: Training, group: ShardGroup
) -> OperatorCosts:
    """The same costs in one group of as many ranks whose collectives take other times."""
    costs = replace(costs, shard_group=group, others=())
    if training.matrix_optimizer is None:
        return costs
    # Of all that is not priced by unit, the steps of whole matrices alone send something.
    matrices = partial(
        _matrix_seconds, operators, training, costs.optimizer, group, costs.model_bytes, costs.owners
    )
    return replace(costs, matrices_sharded=matrices(in_shards=True), matrices_whole=matrices(in_shards=False))


def _matrix_seconds(
    operators: Sequence[Operator],
    training: Training,
    optimizer: OptimizerProfile,
    group: ShardGroup,
    model_bytes: float,
    owners: int,
    *,
    in_shards: bool,
) -> Floats:
    steps = (
        step_of_matrices(op, training, optimizer, group, model_bytes, owners, in_shards=in_shards)
        for op in operators
    )
    return _prefix([seconds for seconds, _ in steps])


def _computed(operator: Operator, training: Training) -> Training:
    """``training`` as it applies to ``operator``, which may keep its dtype."""
    return replace(training, param_dtype=None) if operator.keeps_dtype else training


def _trainable(operator: Operator) -> list[Parameter]:
    return [parameter for parameter in operator.parameters if parameter.trainable]


def _shard_bytes(parameter: Parameter, world_size: int) -> int:
    return shard_numel(parameter.shape, world_size) * DTYPE_BYTES[parameter.dtype]


def _gradient_bytes(parameter: Parameter, training: Training) -> int:
    return parameter.numel * DTYPE_BYTES[training.param_dtype or parameter.dtype]


def gradients_by_parameter(operator: Operator, training: Training) -> list[int]:
    """Gradient bytes of each of its parameters that are trained, as autograd makes them."""
    training = _computed(operator, training)
    return [_gradient_bytes(parameter, training) for parameter in _trainable(operator)]


def gradients_at_once(operator: Operator, training: Training) -> dict[str, int]:
    """Most gradient bytes that backward makes at once, by each of its modules that has parameters to train.

    Those of a matrix product and of a bias come one after the other. Operations with other parameters, such
    as convolutions, norms and recurrent layers, may return all of their gradients together.
    """
    training = _computed(operator, training)
    by_module: dict[str, list[Parameter]] = {}
    for parameter in _trainable(operator):
        by_module.setdefault(parameter.name.rpartition(".")[0], []).append(parameter)
    found = {}
    for module, parameters in by_module.items():
        dims = sorted(len(parameter.shape) for parameter in parameters)
        one_by_one = dims == [1] * (len(dims) - 1) + [2]
        nbytes = [_gradient_bytes(parameter, training) for parameter in parameters]
        found[module] = max(nbytes) if one_by_one else sum(nbytes)
    return found


def _padded(parameter: Parameter, world_size: int, training: Training) -> int:
    """Bytes of its gradient, padded for the shards."""
    return padded_numel(parameter.shape, world_size) * DTYPE_BYTES[training.param_dtype or parameter.dtype]


def _copy_in(operator: Operator, world_size: int, training: Training) -> int:
    """Temporaries of ``torch._chunk_cat`` on CPU that are alive together: copies of what it pads."""
    uneven = [p for p in _trainable(operator) if p.shape and p.shape[0] % world_size != 0]
    return sum(_padded(p, world_size, training) for p in uneven)


def _cast_in(operator: Operator, world_size: int, training: Training) -> int:
    """Its temporary if the dtype changes, which holds one gradient after the other."""
    return max((_padded(p, world_size, training) for p in _cast_gradients(operator, training)), default=0)


def _added_as(operator: Operator, training: Training) -> int:
    """The copy that torch makes, on CPUs, of a gradient that is added to a sum of another dtype."""
    cast = _cast_gradients(operator, training)
    return max((p.numel * DTYPE_BYTES[training.reduce_dtype or p.dtype] for p in cast), default=0)


def _cast_gradients(operator: Operator, training: Training) -> list[Parameter]:
    """Its parameters whose gradients are reduced in another dtype than autograd makes them in."""
    return [
        p
        for p in _trainable(operator)
        if training.reduce_dtype not in (None, training.param_dtype or p.dtype)
    ]


def _gathered(operator: Operator, world_size: int, training: Training) -> int:
    return sum(
        padded_numel(p.shape, world_size) * DTYPE_BYTES[training.param_dtype or p.dtype]
        for p in operator.parameters
    )


def _reduce_input(operator: Operator, world_size: int, training: Training) -> int:
    return sum(
        padded_numel(p.shape, world_size)
        * DTYPE_BYTES[training.reduce_dtype or training.param_dtype or p.dtype]
        for p in _trainable(operator)
    )


def _bucket(operator: Operator, world_size: int, training: Training) -> int:
    return sum(
        p.numel * DTYPE_BYTES[training.reduce_dtype or training.param_dtype or p.dtype]
        for p in _trainable(operator)
    )


def _low_precision(operator: Operator, world_size: int, training: Training) -> int:
    if training.param_dtype is None:
        return 0
    return sum(
        p.numel * DTYPE_BYTES[training.param_dtype]
        for p in operator.parameters
        if p.dtype != training.param_dtype
    )


def _cast(operator: Operator, world_size: int, training: Training) -> int:
    computed = training.param_dtype
    cast = [p for p in operator.parameters if computed is not None and p.dtype != computed]
    return sum(shard_numel(p.shape, world_size) * DTYPE_BYTES[computed or p.dtype] for p in cast)


_COLUMNS: dict[str, Callable[[Operator, int, Training], int]] = {
    "unsharded": _gathered,
    "cast": _cast,
    "gradient": lambda op, n, training: sum(gradients_by_parameter(op, training)),
    "reduce_input": _reduce_input,
    "shard": lambda op, n, training: sum(_shard_bytes(p, n) for p in op.parameters),
    "gradient_sharded": lambda op, n, training: sum(_shard_bytes(p, n) for p in _trainable(op)),
    "bucket": _bucket,
    "gradient_whole": lambda op, n, training: sum(p.nbytes for p in _trainable(op)),
    "low_precision": _low_precision,
    "num_parameters": lambda op, n, training: len(op.parameters),
    "num_trainable": lambda op, n, training: len(_trainable(op)),
    "num_messages": lambda op, n, training: sum(
        shard_numel(p.shape, n) >= SMALL_SHARD for p in _trainable(op)
    ),
    "num_cast": lambda op, n, training: len(_cast_gradients(op, training)),
}


def _state(training: Training, num_shards: int, operator: Operator, trainable_bytes: list[int]) -> int:
    stored = sum(_shard_bytes(p, num_shards) for p in operator.parameters)
    names = (p.name for p in _trainable(operator))
    return stored + state_bytes(operator, training, dict(zip(names, trainable_bytes, strict=True)))


def _temporaries(local_bytes: list[list[int]], training: Training, device_kind: str, add: bool) -> Floats:
    if add:
        return _prefix([float(training.step_temporary_bytes(sizes, device_kind)) for sizes in local_bytes])
    # Those of the tensor before are still there: whose it is depends on the order in which a module lists its
    # parameters, so it counts as the largest that another operator ends with.
    last = [sizes[-1] if sizes else 0 for sizes in local_bytes]
    most, next_most = [*sorted(last, reverse=True), 0, 0][:2]
    return np.array(
        [
            float(training.step_temporary_bytes(sizes, device_kind, next_most if own == most else most))
            for sizes, own in zip(local_bytes, last, strict=True)
        ]
    )


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
