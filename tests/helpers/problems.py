"""Random models, profiles and devices without torch: what the cost and search tests run on."""

import random
from collections.abc import Iterator
from dataclasses import replace

from osdp.cost.sharding.problem import ShardingProblem, build_problem
from osdp.hardware.device_info import COLLECTIVES, DeviceInfo, HostLink, Link
from osdp.hardware.profile import MatrixProfile, OptimizerProfile, PassProfile, Profile, SegmentProfile
from osdp.model.description import (
    Affine,
    ModelDesc,
    Operator,
    Parameter,
    Segment,
    SliceSpec,
    TensorSpec,
    Work,
)
from osdp.model.training import Training

NOTHING = Work(*(Affine(0.0, 0.0),) * 4)

#: For each segment of an operator's window whether it uses the operator's parameters.
Uses = tuple[bool, ...]
_USES: tuple[Uses, ...] = ((True,), (True,), (True, True), (True, False), (True, False, True))


def random_problem(seed: int, num_blocks: int = 1, per_block: int = 2, **options: object) -> ShardingProblem:
    """A small random step; equal blocks, an embedding before and a head after."""
    model_desc, profile = random_model(seed, num_blocks, per_block, tied=bool(options.pop("tied", False)))
    rng = random.Random(seed + 1)
    training = Training(
        optimizer=rng.choice(["AdamW", "SGD"]),
        foreach=options.pop("foreach", None),
        microbatches=options.pop("microbatches", 1),
        param_dtype=options.pop("param_dtype", None),
        reduce_dtype=options.pop("reduce_dtype", None),
        matrix_optimizer=options.pop("matrix_optimizer", None),
    )
    if training.matrix_optimizer is not None:
        own = random.Random(f"matrices {seed}")
        matrices = MatrixProfile(own.uniform(0, 1e-4), own.choice([1e-12, 1e-11, 1e-10]))
        profile = replace(profile, optimizer=replace(profile.optimizer, matrices=matrices))
    reduce_each = bool(options.pop("reduce_each", True))
    return build_problem(
        model_desc, profile, random_device(seed, **options), training, reduce_each=reduce_each
    )


def random_device(seed: int, **options: object) -> DeviceInfo:
    """A random device; with ``groups=G`` the links of groups of *G* are known, faster inside than across."""
    # What was added later draws from a generator of its own: the other numbers of a seed stay.
    rng, own = random.Random(seed + 2), random.Random(f"device {seed}")
    groups = int(str(options.pop("groups", 0)))
    world_size = rng.choice([2, 3, 4, 8] if not groups else [2 * groups, 4 * groups])
    links = tuple(
        Link(name, "world", world_size, rng.uniform(0, 2e-3), rng.choice([2e7, 1e8, 1e9]))
        for name in COLLECTIVES
    )
    if groups:
        links += tuple(_grouped_links(rng, groups, world_size))
    facts = {
        "memory_limit": 2**30,
        "devices_per_node": world_size,
        "links": links,
        "blocking": rng.random() < 0.6,
        "overlap": rng.uniform(0.5, 1.0),
        "mixed_overlap": rng.uniform(0.0, 0.5),
        "compute_overlap": rng.uniform(0.5, 1.0),
        "unit_overhead": rng.uniform(0, 1e-3),
        "gradient_overhead": own.uniform(0, 1e-4),
        "pass_overhead": own.uniform(0, 1e-3),
        "parameter_overhead": own.uniform(0, 1e-4),
        "host": HostLink(rng.uniform(1e8, 1e9), rng.uniform(1e8, 1e9), 2**40),
    }
    return DeviceInfo(**(facts | options))


def _grouped_links(rng: random.Random, size: int, world_size: int) -> Iterator[Link]:
    for kind, ranks, speeds in (
        ("inside", size, [1e8, 1e9]),
        ("across", world_size // size, [2e7, 1e8]),
        ("two_step", world_size, [3e7, 2e8]),
    ):
        for name in COLLECTIVES:
            exchanged = name == "reduce_scatter" and rng.random() < 0.5
            latency, bandwidth = rng.uniform(0, 2e-3), rng.choice(speeds)
            yield Link(name, f"{kind} {size}", ranks, latency, bandwidth, by_exchange=exchanged)


def random_model(
    seed: int, num_blocks: int, per_block: int, *, tied: bool = False
) -> tuple[ModelDesc, Profile]:
    """A model of equal blocks between an embedding and a head, and its profile."""
    # What was added later draws from a generator of its own: the other numbers of a seed stay.
    rng, memory = random.Random(seed), random.Random(f"memory {seed}")
    shapes = [(rng.choice([7, 64, 128, 300]), rng.choice([16, 64, 256])) for _ in range(per_block)]
    embedding, head = (rng.choice([100, 1000, 3001]), 64), (rng.choice([50, 1001]), 64)
    operators: list[Operator] = []
    segments: list[Segment] = []

    def segment(module: str, signature: str, *names: str, part: int = 0) -> None:
        outputs = (TensorSpec((memory.randrange(0, 30_000),), "float32"),)
        dropped = Affine(float(memory.choice([0, memory.randrange(0, 60_000)])), 0.0)
        segments.append(
            Segment(module, 0, part, names, signature, outputs, NOTHING, NOTHING, Affine(0.0, 0.0), dropped)
        )

    def operator(
        name: str, block: str | None, shape: tuple[int, int], *, spanning: bool = False, uses: Uses = (True,)
    ) -> None:
        """An operator, and a segment for each of ``uses``: whether it uses the operator's parameters."""
        weight = Parameter(f"{name}.weight", shape, "float32")
        bias = Parameter(f"{name}.bias", shape[:1], "float32")
        first, last = len(segments), len(segments) + len(uses) - 1
        cut = None if spanning else SliceSpec("output", 0, weight.name)
        operators.append(Operator(name, (name,), (weight, bias), block, first, last, spanning, cut=cut))
        kind = name.rpartition(".")[2]
        for part, used in enumerate(uses):
            segment(name, f"{kind} {part}", *[name] * used, part=part)

    windows = [memory.choice(_USES) for _ in range(per_block)]
    operator("embed", None, embedding, spanning=tied)
    for index in range(num_blocks):
        for number, (shape, uses) in enumerate(zip(shapes, windows, strict=True)):
            operator(f"blocks.{index}.op{number}", f"blocks.{index}", shape, uses=uses)
            segment(f"blocks.{index}", f"between{number}")
    operator("head", None, head)
    segment("", "loss")
    modules = ("", *(op.name for op in operators), *(f"blocks.{i}" for i in range(num_blocks)))
    model_desc = ModelDesc("Random", (), (), 1, True, tuple(segments), tuple(operators), modules)
    found = dict.fromkeys(s.signature for s in segments)
    profile = Profile(
        device="cpu",
        local_batch=1,
        segments=tuple(_random_segment(rng, memory, signature) for signature in found),
        optimizer=OptimizerProfile(rng.uniform(0, 5e-6), rng.uniform(5e-6, 1e-5), rng.uniform(0, 1e-9)),
        resident_bytes=rng.randrange(10**5),
        measured=False,
        model=model_desc.fingerprint,
        host_optimizer=OptimizerProfile(1e-6, 1e-5, rng.uniform(1e-9, 1e-8)),
    )
    return model_desc, profile


def _random_segment(rng: random.Random, memory: random.Random, signature: str) -> SegmentProfile:
    saved = rng.randrange(0, 200_000)
    host = random.Random(f"host {signature} {saved}")
    forward = PassProfile(
        rng.uniform(0, 5e-3), saved, saved + rng.randrange(0, 100_000), host_seconds=host.uniform(0, 6e-3)
    )
    peak = rng.randrange(0, 150_000)
    late = rng.choice([None, rng.randrange(-saved, peak + 1)])
    given = memory.choice([None, memory.randrange(-saved, (peak if late is None else late) + 1)])
    backward = PassProfile(
        rng.uniform(0, 8e-3),
        -saved,
        peak,
        gradient_peak_bytes=late,
        bucket_peak_bytes=given,
        host_seconds=host.uniform(0, 8e-3),
    )
    return SegmentProfile(signature, forward, backward, saved)
