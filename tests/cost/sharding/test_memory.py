"""The memory formulas: their two readers against each other, and moments that were counted by hand."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.cost.sharding.operator_costs import gradients_at_once, gradients_by_parameter
from osdp.cost.sharding.peaks import mildest_violation, step_peaks
from osdp.cost.sharding.problem import ShardingProblem, build_problem, cost_root
from osdp.cost.sharding.rows import memory_row
from osdp.cost.sharding.shard_groups import ShardGroup
from osdp.cost.sharding.simulate import cost_spans
from osdp.cost.sharding.strategies import FULL_SHARD, NO_SHARD, ROOT
from osdp.cost.sharding.timeline import LOOSE_BYTES, RANDOM_STATE, build_timeline
from osdp.cost.sharding.units import UnitCosts
from osdp.hardware.device_info import COLLECTIVES, DeviceInfo, Link
from osdp.hardware.profile import OptimizerProfile, PassProfile, Profile, SegmentProfile
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
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import Route
from osdp.profiler.roofline import estimate
from osdp.search.sharding.root_unit import root_choices
from tests.helpers.problems import random_device, random_model, random_problem
from tests.search.sharding.test_solve import RULES, VARIANTS, random_path, space_of, units_of


@given(seed=st.integers(0, 10_000), variant=st.sampled_from(VARIANTS), rules=st.sampled_from(RULES))
@settings(max_examples=60, deadline=None)
def test_every_moment_of_backward_above_a_limit_is_so_in_its_row(
    seed: int, variant: dict, rules: SearchOptions
) -> None:
    """Moments that are not the highest of their kind are the same in both readers, too."""
    problem = random_problem(seed, 2, 3, **variant)
    rng = random.Random(seed)
    choice = rng.choice(root_choices(problem.timeline.root, SearchOptions()))
    root = choice.cost(problem)
    space = space_of(problem, choice.has_unit, rules)
    path = random_path(space, rng)
    every = units_of(problem, space)
    units = units_of(problem, space, path)
    highest, _ = step_peaks(problem, units, root)[2]
    below = highest
    for share in (0.99, 0.9, 0.7, 0.5):
        moment = mildest_violation(problem, units, root, share * highest)
        assert moment is not None
        row, constant = memory_row(problem, every, root, moment)
        value = row[path].sum() + constant
        assert share * highest < value <= below
        below = value


def test_gradients_of_operators_that_keep_their_dtype_are_of_that_dtype() -> None:
    """When they come was told by half of their bytes."""
    parameters = (Parameter("norm.weight", (6,), "float32"), Parameter("norm.bias", (6,), "float32"))
    norm = Operator("norm", ("norm",), parameters, None, 0, 0, False)
    low = Training(param_dtype="bfloat16")
    for keeps_dtype, nbytes in ((False, 12), (True, 24)):
        operator = replace(norm, keeps_dtype=keeps_dtype)
        assert gradients_by_parameter(operator, low) == [nbytes, nbytes]
        assert gradients_at_once(operator, low) == {"norm": 2 * nbytes}


LINK = Link("all_gather", "world", 4, 0.0, 1e9)
MIB = 2**20


@pytest.mark.parametrize(
    ("group_size", "route", "copies", "gather", "reduce"),
    [
        # Flat over 4 ranks: the copy of the output; a plan's units are all-reduced in place by gloo.
        (0, Route.FLAT, False, 0, 1 / 4),
        (0, Route.FLAT, True, 1, 1 / 4),
        # An exchange is sent and received without copies; the pieces of all ranks are kept until the sum.
        (0, Route.EXCHANGE, True, 1, 1 / 4 + 1),
        (0, Route.EXCHANGE_ALL, True, 0, 1 / 4 + 1),
        # In 2 groups of 2: the column, half of everything, and a copy of it or of a row, as large.
        (2, Route.TWO_STEP, False, 1 / 2, 1 / 4 + 1 / 2),
        (2, Route.TWO_STEP, True, 1, 1 / 4 + 1 / 2),
        (2, Route.TWO_STEP_EXCHANGE, False, 1 / 2, 1 / 4 + 1 / 2 + 1 / 2),
        (2, Route.TWO_STEP_EXCHANGE, True, 1, 1 / 4 + 1 / 2 + 1 / 2),
    ],
)
def test_buffers_of_each_route(
    group_size: int, route: Route, copies: bool, gather: float, reduce: float
) -> None:
    group = ShardGroup(4, LINK, LINK, LINK, group_size=group_size, route=route, copies=copies)
    assert (group.gather_buffers, group.reduce_buffers) == (gather, reduce)


def stack(*mebibytes: int) -> tuple[ModelDesc, Profile]:
    """Operators of these sizes without activations, and without optimizer states."""
    nothing = Work(*(Affine(0.0, 0.0),) * 4)
    names = [f"op{index}" for index in range(len(mebibytes))]
    operators = tuple(
        Operator(name, (name,), (Parameter(f"{name}.weight", (mib * MIB // 4,), "float32"),), None, k, k)
        for k, (name, mib) in enumerate(zip(names, mebibytes, strict=True))
    )
    segments = tuple(
        Segment(name, 0, 0, (name,), name, (), nothing, nothing, Affine(0.0, 0.0)) for name in names
    )
    model_desc = ModelDesc("Stack", (), (), 1, True, segments, operators, ("", *names))
    free = PassProfile(0.0, 0, 0)
    profile = Profile(
        device="cpu",
        local_batch=1,
        segments=tuple(SegmentProfile(name, free, free, 0) for name in names),
        optimizer=OptimizerProfile(0.0, 0.0, 0.0),
        resident_bytes=0,
        measured=False,
        model=model_desc.fingerprint,
    )
    return model_desc, profile


@pytest.mark.parametrize("copies", [False, True])
def test_what_is_gathered_ahead_is_there_twice_where_messages_are_copied(copies: bool) -> None:
    """Two units of 8 and 2 MiB: the first is gathered when the second is whole, before its gradient."""
    model_desc, profile = stack(8, 2)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links, copies_messages=copies)
    problem = build_problem(model_desc, profile, device, Training(optimizer="SGD"))
    units = cost_spans(problem, [(0, 1, FULL_SHARD), (1, 2, FULL_SHARD)])
    root = cost_root(problem, (), (), has_unit=False)
    peaks = {moment.kind: peak - LOOSE_BYTES for peak, moment in step_peaks(problem, units, root)}
    shards = (8 + 2) // 2
    assert peaks.get("prefetch") == ((shards + 2 + 2 * 8) * MIB if copies else None)
    # Its gradient comes when the copy is gone; of the first unit: whole, its gradient, the second's input.
    assert peaks["backward"] == (shards + 1 + 8 + 8 + 2) * MIB


def test_a_recomputed_block_is_gathered_before_its_forward_is_rerun() -> None:
    """A transformer on four ranks was predicted 2.5 % above its peak: its activations were counted early."""
    model_desc, profile = stack(8, 8)
    operators = tuple(replace(operator, block=operator.name) for operator in model_desc.operators)
    none = Affine(0.0, 0.0)
    segments = tuple(replace(s, dropped_bytes=none, released_bytes=none) for s in model_desc.segments)
    model_desc = replace(model_desc, operators=operators, segments=segments)
    forward, backward = PassProfile(0.0, 64 * MIB, 64 * MIB), PassProfile(0.0, -64 * MIB, 0)
    saved = tuple(replace(s, forward=forward, backward=backward) for s in profile.segments)
    profile = replace(profile, segments=saved, model=model_desc.fingerprint)
    problem = build_problem(
        model_desc, profile, random_device(3, copies_messages=True), Training(optimizer="SGD")
    )
    again = FULL_SHARD._replace(recomputed=1)
    units = cost_spans(problem, [(0, 1, again), (1, 2, again)])
    root = cost_root(problem, (), (), has_unit=False)
    peaks = {moment.kind: peak for peak, moment in step_peaks(problem, units, root)}
    # Where its backward computes, one block has its activations; where it is gathered, none has.
    assert peaks["backward"] > 64 * MIB
    gathered = [peak for kind, peak in peaks.items() if kind in ("backward_unshard", "prefetch")]
    assert gathered and max(gathered) < 64 * MIB


def highest_in_backward(problem: ShardingProblem, units: UnitCosts) -> float:
    """Bytes of the highest moment of compute in backward."""
    root = cost_root(problem, (), (), has_unit=False)
    return next(
        peak - LOOSE_BYTES for peak, moment in step_peaks(problem, units, root) if moment.kind == "backward"
    )


def test_gradients_and_buckets_count_from_when_they_are_there() -> None:
    """Of 10 MiB at which a backward begins, 6 are left when it makes its gradient and 1 when it has it."""
    model_desc, profile = stack(2, 8)
    first, last = profile.segments
    begins = PassProfile(0.0, 0, 10 * MIB, gradient_peak_bytes=6 * MIB, bucket_peak_bytes=MIB)
    profile = replace(profile, segments=(first, replace(last, backward=begins)))
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    problem = build_problem(model_desc, profile, device, Training(optimizer="SGD"))
    # One bucket of 10: the gradient of 8 is copied into it.
    replicated = cost_spans(problem, [(0, 2, NO_SHARD)])
    assert highest_in_backward(problem, replicated) == (10 + max(10, 6 + 8, 1 + 10 + 8)) * MIB
    # Its only gradient is the bucket.
    alone = cost_spans(problem, [(0, 1, NO_SHARD), (1, 2, NO_SHARD)])
    assert highest_in_backward(problem, alone) == (10 + max(10, 6 + 8, 1 + 8)) * MIB
    sharded = cost_spans(problem, [(0, 2, FULL_SHARD)])
    assert highest_in_backward(problem, sharded) == (5 + 10 + max(10, 6 + 8)) * MIB


def test_a_bucket_is_not_there_before_the_operator_that_opens_it_has_made_a_gradient() -> None:
    """The row of a plan that gathers that operator once counted it beside all that backward begins with."""
    model_desc, profile = stack(8, 1)
    first, last = profile.segments
    forward = PassProfile(0.0, 20 * MIB, 20 * MIB)
    backward = PassProfile(0.0, -20 * MIB, 2 * MIB, gradient_peak_bytes=2 * MIB, bucket_peak_bytes=-20 * MIB)
    profile = replace(profile, segments=(first, replace(last, forward=forward, backward=backward)))
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links, copies_messages=True)
    problem = build_problem(model_desc, profile, device, Training(optimizer="SGD"))
    root = cost_root(problem, (), (), has_unit=False)
    sharded = cost_spans(problem, [(0, 1, FULL_SHARD), (1, 2, FULL_SHARD)])
    replicated = cost_spans(problem, [(0, 2, NO_SHARD)])
    highest = max(peak for peak, _ in step_peaks(problem, replicated, root))
    kinds = set()
    for _, moment in step_peaks(problem, sharded, root):
        kinds.add(moment.kind)
        row, constant = memory_row(problem, replicated, root, moment)
        assert row.sum() + constant <= highest, moment
    assert {"backward_unshard", "prefetch"} <= kinds


@pytest.mark.parametrize(("reduce_dtype", "bucket"), [("float32", 8), ("float16", 4)])
def test_the_only_gradient_of_a_bucket_of_another_dtype_is_copied_into_it(
    reduce_dtype: str, bucket: int
) -> None:
    """Two dtypes may have equal bytes."""
    model_desc, profile = stack(8)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    training = Training(optimizer="SGD", param_dtype="bfloat16", reduce_dtype=reduce_dtype)
    problem = build_problem(model_desc, profile, device, training)
    units = cost_spans(problem, [(0, 1, NO_SHARD)])
    # The parameter, its copy in bfloat16, the bucket, and the gradient in bfloat16.
    assert highest_in_backward(problem, units) == (8 + 4 + bucket + 4) * MIB


@pytest.mark.parametrize(("reduce_dtype", "added"), [("bfloat16", 0), ("float16", 4 + 4)])
def test_kept_gradients_of_another_dtype_are_not_added_in_place(reduce_dtype: str, added: int) -> None:
    """Two operators in one unit: until they are added, new gradients are there beside what is kept.

    Torch adds them, on CPUs, by way of a copy in the other dtype.
    """
    model_desc, profile = stack(8, 8)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    training = Training(optimizer="SGD", param_dtype="bfloat16", reduce_dtype=reduce_dtype, microbatches=2)
    problem = build_problem(model_desc, profile, device, training, reduce_each=False)
    units = cost_spans(problem, [(0, 2, FULL_SHARD)])
    shards, kept, gathered, gradient = 8, 8, 8, 4
    assert highest_in_backward(problem, units) == (shards + kept + gathered + gradient + added) * MIB


def test_a_kept_gradient_of_another_dtype_does_not_become_the_bucket() -> None:
    """Two microbatches, reduced each: beside the reduced gradient there are the bucket and a gradient."""
    model_desc, profile = stack(8)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    training = Training(optimizer="SGD", reduce_dtype="bfloat16", microbatches=2)
    problem = build_problem(model_desc, profile, device, training)
    units = cost_spans(problem, [(0, 1, NO_SHARD)])
    assert highest_in_backward(problem, units) == (8 + 8 + 4 + 8) * MIB


def test_kept_gradients_are_there_once_and_only_the_last_backward_reduces_them() -> None:
    """Two microbatches, one reduction: a new gradient is added in place, and freed before the next one."""
    model_desc, profile = stack(2, 8, 4)
    # The gap between the first two operators is the highest moment.
    first, second, third = profile.segments
    between = replace(first, signature="between", backward=PassProfile(0.0, 0, 100 * MIB))
    segments = list(model_desc.segments)
    segments.insert(1, replace(segments[0], module="", operators=(), signature="between"))
    operators = tuple(
        replace(op, first=op.first + (k > 0), last=op.last + (k > 0))
        for k, op in enumerate(model_desc.operators)
    )
    model_desc = replace(model_desc, segments=tuple(segments), operators=operators)
    profile = replace(profile, segments=(first, between, second, third), model=model_desc.fingerprint)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    training = Training(optimizer="SGD", microbatches=2)
    problem = build_problem(model_desc, profile, device, training, reduce_each=False)
    units = cost_spans(problem, [(0, 2, FULL_SHARD), (2, 3, FULL_SHARD)])
    shards, kept, gathered = 7, 14, 10
    # Beside the gradients of all: the other unit's are freed when it reduces; its input and shard are there.
    assert highest_in_backward(problem, units) == (shards + kept + gathered + 4 + 2 - 4 + 100) * MIB


def test_copies_that_change_the_dtype_are_made_one_after_the_other() -> None:
    """The copy-in of 2 and 8 MiB in bfloat16 needs a copy of one at a time beside the input in float32."""
    model_desc, profile = stack(4, 16)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    training = Training(optimizer="SGD", param_dtype="bfloat16", reduce_dtype="float32")
    problem = build_problem(model_desc, profile, device, training)
    units = cost_spans(problem, [(0, 2, FULL_SHARD)])
    # The input; the gradients and the larger copy.
    assert units.reduce_peak.tolist() == [(4 + 16 + max(2 + 8 + 8, 8 + 10)) * MIB]


def test_gradients_reduced_in_another_dtype_than_that_of_storage_are_cast_beside_it() -> None:
    """Parameters of 4 and 16 MiB in float32, computed and reduced in bfloat16: 2 and 8.

    The casts were not counted: a step of replicated parameters took a quarter more than its limit.
    """
    model_desc, profile = stack(4, 16)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    training = Training(optimizer="SGD", param_dtype="bfloat16")
    problem = build_problem(model_desc, profile, device, training)
    sharded = cost_spans(problem, [(0, 2, FULL_SHARD)])
    # The input; the last gradient, the shard in bfloat16 and in float32.
    assert sharded.reduce_peak.tolist() == [(2 + 8 + max(2 + 8, 8 + 5 + 10)) * MIB]
    replicated = cost_spans(problem, [(0, 1, NO_SHARD), (1, 2, NO_SHARD)])
    root = cost_root(problem, (), (), has_unit=False)
    (cast,) = (peak for peak, moment in step_peaks(problem, replicated, root) if moment.kind == "cast")
    # Parameters and their copies; the second unit's bucket and cast, the first one's bucket.
    assert cast == LOOSE_BYTES + (4 + 16 + 2 + 8 + 8 + 16 + 2) * MIB


@pytest.mark.parametrize(("reduce_each", "sums"), [(False, 0), (True, 4 + 16)])
def test_sums_over_microbatches_are_cast_once_or_added_to_what_is_there(reduce_each: bool, sums: int) -> None:
    """Casts were counted with one microbatch alone."""
    model_desc, profile = stack(4, 16)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    training = Training(optimizer="SGD", param_dtype="bfloat16", microbatches=2)
    problem = build_problem(model_desc, profile, device, training, reduce_each=reduce_each)
    units = cost_spans(problem, [(0, 1, NO_SHARD), (1, 2, NO_SHARD)])
    root = cost_root(problem, (), (), has_unit=False)
    (cast,) = (peak for peak, moment in step_peaks(problem, units, root) if moment.kind == "cast")
    # As with one microbatch; what is summed already stands beside it.
    assert cast == LOOSE_BYTES + (4 + 16 + 2 + 8 + 8 + 16 + 2 + sums) * MIB


def test_units_whose_input_needs_no_gradient_are_whole_until_backward_ends() -> None:
    """Two tables of 2 and 8 MiB: FSDP2 reduces both when everything else is done."""
    model_desc, profile = stack(2, 8)
    tables = tuple(
        replace(
            operator,
            parameters=(replace(weight, shape=(weight.numel // 1024, 1024)),),
            cut=SliceSpec("output", 0, weight.name, 0, False),
        )
        for operator in model_desc.operators
        for weight in operator.parameters
    )
    model_desc = replace(model_desc, operators=tables)
    profile = replace(profile, model=model_desc.fingerprint)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    problem = build_problem(model_desc, profile, device, Training(optimizer="SGD"))
    units = cost_spans(problem, [(0, 1, FULL_SHARD), (1, 2, FULL_SHARD)])
    root = cost_root(problem, (), (), has_unit=False)
    final = max(peak for peak, moment in step_peaks(problem, units, root) if moment.kind == "final")
    assert final == LOOSE_BYTES + (1 + 4 + 2 * (2 + 8)) * MIB


def test_a_loop_over_parameters_holds_the_temporaries_of_the_one_before() -> None:
    """Of another operator, too: of eight equal ones without biases half were forgotten."""
    model_desc, profile = stack(8, 8, 2)
    training = Training(optimizer="RMSprop", foreach=False)
    device = DeviceInfo(memory_limit=2**40)
    problem = build_problem(model_desc, profile, device, training)
    both = training.step_temporary_bytes([8 * MIB, 8 * MIB], "cpu")
    assert both > training.step_temporary_bytes([8 * MIB], "cpu")
    assert problem.costs.temporary_whole.max() == both


def test_a_batch_in_another_dtype_is_there_twice() -> None:
    model_desc, _ = stack(2)
    sample = (TensorSpec((4, MIB), "float32"), TensorSpec((4,), "int64"))
    model_desc = replace(model_desc, sample=sample, local_batch=4)
    device = DeviceInfo(memory_limit=2**40, flops=1e9, memory_bandwidth=1e9)

    def resident(**options: str) -> int:
        return estimate(model_desc, device, Training(local_batch=2, **options)).resident_bytes

    assert resident(param_dtype="bfloat16") - resident() == 2 * 2 * MIB


def test_of_unknown_drops_a_recomputed_block_holds_all_that_it_is_given() -> None:
    model_desc, profile = random_model(1, 2, 2)
    unknown = tuple(
        replace(segment, dropped_bytes=None, released_bytes=None) for segment in model_desc.segments
    )
    again = build_timeline(replace(model_desc, segments=unknown), profile).recompute
    first = np.flatnonzero(again.possible)
    assert len(first) == 2
    for block, start in zip(model_desc.block_segments.values(), first, strict=True):
        (given,) = model_desc.segments[block[0] - 1].outputs
        assert again.rerun_input[start] == again.rerun_input_early[start] == 4 * given.shape[0] + RANDOM_STATE


def test_the_root_units_last_gradient_outlives_the_copy_into_its_reduction() -> None:
    """Of 2 and 8 MiB in the root unit, the 8 are still there beside the reduction's input and output."""
    model_desc, profile = stack(2, 8)
    links = tuple(Link(name, "world", 2, 0.0, 1e9) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**40, devices_per_node=2, links=links)
    problem = build_problem(model_desc, profile, device, Training(optimizer="SGD"))
    units = cost_spans(problem, [(0, 1, ROOT), (1, 2, ROOT)])
    root = cost_root(problem, (), (), has_unit=True)
    finals = {
        moment.where: peak for peak, moment in step_peaks(problem, units, root) if moment.kind == "final"
    }
    shards, whole = (2 + 8) // 2, 2 + 8
    assert finals == {
        -1: LOOSE_BYTES + (shards + whole + whole) * MIB,
        1: LOOSE_BYTES + (shards + 8 + whole + whole // 2) * MIB,
    }


def test_what_a_block_computes_behind_its_parameters_is_not_subtracted_twice() -> None:
    """Backward frees it before it reaches the last operator, whether the block is recomputed or not."""
    model_desc, profile = stack(8, 8)
    nothing = Work(*(Affine(0.0, 0.0),) * 4)
    none = Affine(0.0, 0.0)
    behind = Segment("op1", 0, 1, (), "behind", (), nothing, nothing, none, none, none)
    operators = tuple(replace(operator, block=operator.name) for operator in model_desc.operators)
    segments = (*(replace(s, dropped_bytes=none, released_bytes=none) for s in model_desc.segments), behind)
    model_desc = replace(model_desc, operators=operators, segments=segments)
    forward, backward = PassProfile(0.0, 16 * MIB, 16 * MIB), PassProfile(0.0, -16 * MIB, 0)
    saved = [replace(s, forward=forward, backward=backward) for s in profile.segments]
    saved.append(replace(saved[0], signature="behind"))
    profile = replace(profile, segments=tuple(saved), model=model_desc.fingerprint)
    again = build_timeline(model_desc, profile).recompute
    # Of 32 MiB, 16 are gone when the backward of the last operator begins.
    assert again.saving[1] - again.not_rerun[1] == pytest.approx(16 * MIB, abs=2**16)
    assert again.not_rerun[0] == again.saving[0]
