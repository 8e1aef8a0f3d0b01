"""RankDesc: the part of a model on one tensor-parallel rank, and its collectives.

The part of a model on one rank is described like a model: its description has the names, modules and order of
the whole model's description, the parameter shapes of the first rank (which has the largest part where shards
are uneven) and the activations of that rank. So everything that prices a model can price a part of it.
"""

from dataclasses import dataclass, replace

from osdp import codec
from osdp.model.description import ModelDesc, Segment, SegmentKey
from osdp.plan.tensor_parallel import TensorParallelPlan


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of the tensor-parallel group.

    Attributes:
        collective: One of :data:`osdp.hardware.device_info.COLLECTIVES`.
        nbytes: Bytes of the whole (unsharded) tensor, at the traced batch.
        backward: Whether it belongs to the backward.
        per_sample: Whether the tensor grows with the batch; gradients of parameters do not.
    """

    collective: str
    nbytes: int
    backward: bool
    per_sample: bool = True


@dataclass(frozen=True, slots=True)
class SegmentExchanges:
    """Collectives of a segment, in order.

    Attributes:
        signature: Signature of the segment.
        exchanges: Its collectives.
    """

    signature: str
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True)
class RankDesc:
    """Description of the first tensor-parallel rank's part of a model.

    Attributes:
        model: Fingerprint of the whole model's description.
        plan: Sharding of the model over the ranks.
        desc: Description of the first rank's part.
        exchanges: Collectives of the segments that have any.
    """

    model: str
    plan: TensorParallelPlan
    desc: ModelDesc
    exchanges: tuple[SegmentExchanges, ...]


def rank_desc(
    whole: ModelDesc,
    part: ModelDesc,
    plan: TensorParallelPlan,
    exchanges: dict[SegmentKey, tuple[Exchange, ...]],
) -> RankDesc:
    """Join the description of a rank's part with its collectives.

    Args:
        whole: Description of the whole model.
        part: Description of the first rank's part.
        plan: Sharding of the model over the ranks.
        exchanges: Collectives by module, call and part of the segment; segments that run the same kernels but
            different collectives get different signatures.

    Raises:
        ValueError: The two descriptions have different operators.
    """
    if _names(whole) != _names(part):
        raise ValueError(
            f"the tensor-parallel parts of {whole.name} have other operators than the whole model, so its "
            "plans do not fit them; use data parallelism or pipeline stages for it"
        )
    segments = tuple(_marked(segment, exchanges.get(segment.key, ())) for segment in part.segments)
    found = {
        segment.signature: SegmentExchanges(segment.signature, exchanges[segment.key])
        for segment in segments
        if exchanges.get(segment.key)
    }
    return RankDesc(whole.fingerprint, plan, replace(part, segments=segments), tuple(found.values()))


def _marked(segment: Segment, exchanges: tuple[Exchange, ...]) -> Segment:
    if not exchanges:
        return segment
    return replace(segment, signature=codec.fingerprint((segment.signature, exchanges)))


def _names(desc: ModelDesc) -> list[tuple[str, tuple[str, ...]]]:
    return sorted((op.name, tuple(p.name for p in op.parameters)) for op in desc.operators)
