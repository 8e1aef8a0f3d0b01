"""What a row's framework could run when the row was measured: the choices its authors had.

A published layout can only be expected to be near the best of these. Recomputation of the attention's core
alone came with Korthikanti et al. (May 2022), and Megatron-LM's distributed optimizer in the same year: the
rows of Narayanan et al. (2021) and of BigScience's V100 had neither. DeepSpeed's pipeline has no interleaved
stages, and only its first ZeRO stage. FSDP has neither stages nor tensor parallelism of its own; it may shard
among the ranks of a node (HSDP). (From the
frameworks' documents as they are remembered, not reopened.)
"""

from collections.abc import Mapping
from dataclasses import replace

from osdp.cluster.plan import RecomputeLayers
from osdp.cluster.search.space import NODE, LayoutSpace

#: What users of any framework choose from: one strategy for all layers, whole sequences.
ANY = LayoutSpace(
    samples=(1, 2, 4, 8, 16),
    schedules=("1f1b", "interleaved"),
    recompute=tuple(RecomputeLayers),
    zero=(0, 1, 2, 3),
    token_slices=(1,),
)

_WHOLE = (RecomputeLayers.NONE, RecomputeLayers.FULL)
_FSDP = replace(ANY, tp=(1,), pp=(1,), zero=(0, 2, 3), recompute=_WHOLE, shard_degrees=(0, NODE))
_STAGED_FSDP = replace(ANY, zero=(2, 3), recompute=_WHOLE, shard_degrees=(0, NODE), torch_schedules=True)
_DEEPSPEED = replace(ANY, zero=(0, 1), recompute=_WHOLE, schedules=("1f1b",))
_MEGATRON = replace(ANY, zero=(0, 1), whole_groups=True)
_MEGATRON_OF_2021 = replace(_MEGATRON, zero=(0,), recompute=_WHOLE)
_MEGATRON_OF_2022 = replace(_MEGATRON, zero=(0,))

#: Spaces by the start of a framework's name, the first that fits; those of a paper or a report come first.
_SPACES = (
    ("Megatron-LM + DeepSpeed ZeRO-3", replace(ANY, pp=(1,), recompute=_WHOLE)),
    ("DeepSpeed ZeRO-3", replace(_FSDP, zero=(0, 1, 2, 3), shard_degrees=(0,))),
    ("Megatron-DeepSpeed", _DEEPSPEED),
    ("InternLM", _DEEPSPEED),
    ("torchtitan", _STAGED_FSDP),
    ("llm-foundry", _FSDP),
    ("PyTorch FSDP", _FSDP),
)
_SOURCES = (
    ("2104.04473", _MEGATRON_OF_2021),
    ("experiments/gpt2.md", _MEGATRON_OF_2021),
    ("2205.05198", _MEGATRON_OF_2022),
)


def space_of(row: Mapping[str, str]) -> LayoutSpace:
    """The choices of the row's framework, with the row's own microbatch among them."""
    named = [space for start, space in _SPACES if row["framework"].startswith(start)]
    dated = [space for part, space in _SOURCES if part in row["source_url"]]
    return with_samples((*named, *dated, _MEGATRON)[0], row)


def with_samples(space: LayoutSpace, row: Mapping[str, str]) -> LayoutSpace:
    """A space that has the row's microbatch."""
    own = {int(row["micro_batch"])} if row["micro_batch"] else set()
    return replace(space, samples=tuple(sorted({*space.samples, *own})))
