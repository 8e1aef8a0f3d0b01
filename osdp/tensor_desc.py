"""RankDesc: what one of the ranks that compute a layer together computes, and what it exchanges with them.

A part of a model is a model: its description has the names, the modules and the order of the whole one's, the
shapes of the first rank's parameters (of uneven ones it has the largest part) and the activations that rank
holds. So everything that prices a model prices a part of it.
"""

from dataclasses import dataclass, replace

from osdp import codec
from osdp.model_desc import ModelDesc, Segment
from osdp.tensor_plan import TensorParallelPlan

Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective.

    Attributes:
        collective: One of :data:`osdp.device_info.COLLECTIVES`.
        nbytes: Bytes of the whole tensor, at the traced batch.
        backward: Whether it is a part of the backward.
        per_sample: Whether the tensor grows with the batch; gradients of parameters do not.
    """

    collective: str
    nbytes: int
    backward: bool
    per_sample: bool = True


@dataclass(frozen=True, slots=True)
class SegmentExchanges:
    """What a segment exchanges, in order.

    Attributes:
        signature: Of the segment.
        exchanges: The collectives.
    """

    signature: str
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True)
class RankDesc:
    """What the first of several ranks computes.

    Attributes:
        model: Fingerprint of the whole model's description.
        plan: How the ranks share the model.
        desc: The description of its part.
        exchanges: What those segments exchange that exchange anything.
    """

    model: str
    plan: TensorParallelPlan
    desc: ModelDesc
    exchanges: tuple[SegmentExchanges, ...]


def rank_desc(
    whole: ModelDesc,
    part: ModelDesc,
    plan: TensorParallelPlan,
    exchanges: dict[Key, tuple[Exchange, ...]],
) -> RankDesc:
    """Join the description of a part with what it exchanges.

    Args:
        whole: The whole model.
        part: What the first rank computes.
        plan: How the ranks share the model.
        exchanges: By module, call and part of the segment; segments that run alike but exchange different
            things get signatures of their own.

    Raises:
        ValueError: The two have other operators.
    """
    if _names(whole) != _names(part):
        raise ValueError(
            f"the parts of {whole.name} have other operators than the whole, so plans of it do not fit them; "
            "use data parallelism or pipeline stages for it"
        )
    segments = tuple(_marked(segment, exchanges.get(key(segment), ())) for segment in part.segments)
    found = {
        segment.signature: SegmentExchanges(segment.signature, exchanges[key(segment)])
        for segment in segments
        if exchanges.get(key(segment))
    }
    return RankDesc(whole.fingerprint, plan, replace(part, segments=segments), tuple(found.values()))


def key(segment: Segment) -> Key:
    """What segments of a model and of its parts are joined by."""
    return segment.module, segment.call, segment.part


def _marked(segment: Segment, exchanges: tuple[Exchange, ...]) -> Segment:
    if not exchanges:
        return segment
    return replace(segment, signature=codec.fingerprint((segment.signature, exchanges)))


def _names(desc: ModelDesc) -> list[tuple[str, tuple[str, ...]]]:
    return sorted((op.name, tuple(p.name for p in op.parameters)) for op in desc.operators)
