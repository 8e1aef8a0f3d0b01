"""Optimizers of whole matrices: bytes and seconds of their steps, and which ranks orthogonalize what.

The runtime sends the parts of a matrix to one rank, its owner, or gathers it on all of them
(:mod:`osdp.runtime.optimizer.whole_matrices`). Here both are priced, operator by operator; the cheaper one is
what the operator costs in a mode, and what its decision says.
"""

from collections.abc import Mapping, Sequence

from osdp.cost.sharding.shard_groups import ShardGroup
from osdp.hardware.profile import OptimizerProfile
from osdp.model.description import Operator, Parameter
from osdp.model.training import MATRIX_OPTIMIZERS, Training
from osdp.plan.shard_math import matrix_step_bytes
from osdp.plan.sharding import MatrixStep

#: Bytes of bfloat16, in which matrices are sent and orthogonalized.
_BFLOAT16 = 2


def stepped_whole(operator: Operator, training: Training) -> list[Parameter]:
    """The parameters of ``operator`` that an optimizer of whole matrices steps: those of blocks, as advised.

    Embeddings and heads are left to the other optimizer (``torch.optim.Muon``, notes of its documentation).
    """
    if training.matrix_optimizer is None or operator.block is None:
        return []
    return [p for p in operator.parameters if p.trainable and len(p.shape) == 2]


def state_bytes(operator: Operator, training: Training, local_bytes: Mapping[str, int]) -> int:
    """Bytes of optimizer states on one rank.

    Args:
        operator: The operator.
        training: The training.
        local_bytes: Bytes of each trainable parameter as the rank stores it, by name.
    """
    matrices = {parameter.name for parameter in stepped_whole(operator, training)}
    others = [nbytes for name, nbytes in local_bytes.items() if name not in matrices]
    found = training.state_bytes(sum(others), len(others))
    if training.matrix_optimizer is not None:
        found += MATRIX_OPTIMIZERS[training.matrix_optimizer] * sum(local_bytes[name] for name in matrices)
    return found


def temporary_bytes(operators: Sequence[Operator], training: Training, num_ranks: int) -> int:
    """Most bytes that the step of all matrices takes beside parameters, gradients and states."""
    matrices = [p for operator in operators for p in stepped_whole(operator, training)]
    return matrix_step_bytes([parameter.numel for parameter in matrices], num_ranks)


def num_owners(operators: Sequence[Operator], training: Training, num_ranks: int) -> int:
    """Number of ranks that can own a matrix, at least 1."""
    matrices = sum(len(stepped_whole(operator, training)) for operator in operators)
    return max(min(num_ranks, matrices), 1)


def step_of_matrices(
    operator: Operator,
    training: Training,
    optimizer: OptimizerProfile,
    group: ShardGroup,
    model_bytes: float,
    owners: int,
    *,
    in_shards: bool,
) -> tuple[float, MatrixStep | None]:
    """Seconds of orthogonalizing the matrices of an operator beside what its elements take, and how.

    Owners are taken to be equally busy, and latencies to be shared by all matrices of the model.

    Args:
        operator: The operator.
        training: The training.
        optimizer: Seconds of the optimizer's step.
        group: The ranks that its parameters are spread over.
        model_bytes: Bytes of all trainable parameters.
        owners: Number of ranks that own matrices.
        in_shards: Whether each rank has a shard of them, or all of them.
    """
    matrices, profile = stepped_whole(operator, training), optimizer.matrices
    if not matrices or profile is None:
        return 0.0, None
    work = sum(profile.seconds(parameter.shape) for parameter in matrices)
    nbytes = _BFLOAT16 * sum(parameter.numel for parameter in matrices)
    sent = nbytes / group.gather.bandwidth
    latency = sum(parameter.nbytes for parameter in matrices) / max(model_bytes, 1.0) * group.gather.latency
    if group.num_shards == 1:
        return work, MatrixStep.GATHERED
    # Parts to the owner and back; of whole matrices the result alone, to all.
    messages = 2 * sent / group.num_shards + 2 * latency if in_shards else sent + latency
    owned = work / min(owners, group.num_shards) + messages
    gathered = work + sent + latency
    # Whole matrices have one owner each: computed by several ranks, of different kinds perhaps, copies of a
    # matrix would drift apart by the rounding of bfloat16.
    if in_shards and gathered <= owned:
        return gathered, MatrixStep.GATHERED
    return owned, MatrixStep.OWNED
