"""One plan for batches of several shapes fits the largest, and is the fastest for how often each occurs."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support import opaque_models
from benchmarks.support.candidates import given_device
from benchmarks.support.models import CASES, loss_of
from osdp import OSDP, BatchMix, InfeasibleError, ModelDesc, Plan, Training, codec, make_plan
from osdp.cost.evaluate import evaluate
from osdp.hardware.device_info import DeviceInfo
from osdp.plan.plan import PROVEN_WITHIN
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import Mode
from osdp.profiler.roofline import estimate
from osdp.search.batch_mix import BatchShape, _mean_profile, best_plan_of_mix
from osdp.search.sharding import planner
from osdp.search.sharding.planner import Candidate, best_plan
from osdp.search.sharding.solve import solve_bounded
from tests.helpers.distributed import run
from tests.helpers.opaque_nets import build
from tests.test_parity import difference, whole

CASE = CASES["gpt2-tiny"]
TRAINING = Training(microbatches=1)


def batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(samples * length).view(samples, length) % 64
    return {"input_ids": ids, "labels": ids}


def devices(limit: int = 2**40) -> DeviceInfo:
    return replace(given_device(2), memory_limit=limit, flops=2e9, memory_bandwidth=5e9)


def shapes_of(
    sizes: Sequence[tuple[int, int]], shares: Sequence[float], device: DeviceInfo
) -> list[BatchShape]:
    found = []
    for (samples, length), share in zip(sizes, shares, strict=True):
        desc = ModelDesc.from_module(CASE.model(device="meta"), batch(samples, length))
        training = replace(TRAINING, local_batch=samples)
        found.append(BatchShape(desc, estimate(desc, device, training), share))
    return found


def steps_of(plan: Plan, shapes: Sequence[BatchShape], device: DeviceInfo) -> list[Any]:
    return [
        evaluate(
            plan, s.profile, device, replace(plan.training, local_batch=s.profile.local_batch), s.model_desc
        )
        for s in shapes
    ]


def mean_of(plan: Plan, shapes: Sequence[BatchShape], device: DeviceInfo) -> float:
    steps = steps_of(plan, shapes, device)
    return sum(s.share * step.step_seconds for s, step in zip(shapes, steps, strict=True))


SIZES = [(2, 32), (2, 8), (8, 4)]


@pytest.mark.parametrize("shares", [(0.1, 0.8, 0.1), (0.6, 0.2, 0.2)])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_it_fits_the_largest_and_is_the_fastest_in_the_mean(shares: Any, share: float) -> None:
    device = devices()
    shapes = shapes_of(SIZES, shares, device)
    low, high = (
        make_plan(
            None, shapes[0].model_desc, device, training=replace(TRAINING, local_batch=2),
            profile=shapes[0].profile, strategy=strategy,
        ).predicted.peak_bytes
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )  # fmt: skip
    device = devices(int(low + share * (high - low)))
    found = best_plan_of_mix(shapes, [TRAINING], device)
    steps = steps_of(found, shapes, device)
    assert max(step.peak_bytes for step in steps) == found.predicted.peak_bytes <= device.memory_limit
    assert found.predicted.step_seconds == pytest.approx(mean_of(found, shapes, device))
    # No other plan that fits is faster: those for each shape, and uniform ones.
    for shape, strategy in itertools.product(shapes, (None, *Mode)):
        try:
            training = replace(TRAINING, local_batch=shape.profile.local_batch)
            if strategy is None:
                rival = best_plan(shape.model_desc, [Candidate(training, shape.profile)], device)
            else:
                rival = make_plan(
                    None, shape.model_desc, device, training=training, profile=shape.profile,
                    strategy=str(strategy),
                )  # fmt: skip
        except (InfeasibleError, ValueError):
            continue
        if max(step.peak_bytes for step in steps_of(rival, shapes, device)) <= device.memory_limit:
            assert found.predicted.step_seconds <= mean_of(rival, shapes, device) * 1.002, strategy
    assert found.batch_shapes == tuple(SIZES) and found.local_batch == 2
    told = [note for note in found.notes if note.startswith("batches of ")]
    assert len(told) == 3 and f"batches of 8 x 4, {shares[2]:.0%} of all" in told[2]
    assert any("samples of the largest" in note for note in found.notes)
    assert codec.from_json(Plan, codec.to_json(found)) == found
    with pytest.raises(ValueError, match="made for batches of 3 shapes: it is not explained"):
        found.explain()


def test_how_often_a_shape_occurs_decides() -> None:
    # To recompute takes longer the longer a batch is; to gather does not.
    rules = SearchOptions(recompute=True)
    differ = 0
    for limit in (9 * 2**18, 5 * 2**19):
        device = devices(limit)
        mixes = [shapes_of([(2, 32), (2, 4)], shares, device) for shares in ((0.99, 0.01), (0.01, 0.99))]
        found = [best_plan_of_mix(mix, [TRAINING], device, rules) for mix in mixes]
        if (found[0].units, found[0].recomputed) == (found[1].units, found[1].recomputed):
            continue
        differ += 1
        for own, other, mix in zip(found, reversed(found), mixes, strict=True):
            assert mean_of(own, mix, device) <= mean_of(other, mix, device) * 1.001
    assert differ


def test_a_shape_that_takes_more_than_the_largest_is_kept_within_the_limit() -> None:
    # Nothing but the profile says so: of a shape with fewer saved bytes a workspace, say.
    device = devices()
    shapes = shapes_of(SIZES[:2], (0.5, 0.5), device)
    free = best_plan_of_mix(shapes, [TRAINING], device)
    heavy = replace(shapes[1].profile, resident_bytes=shapes[1].profile.resident_bytes + 2**20)
    shapes[1] = replace(shapes[1], profile=heavy)
    limit = max(step.peak_bytes for step in steps_of(free, shapes, device)) - 2**17
    found = best_plan_of_mix(shapes, [TRAINING], devices(limit))
    peaks = [step.peak_bytes for step in steps_of(found, shapes, devices(limit))]
    assert peaks[1] > peaks[0] and max(peaks) <= limit == found.memory_limit and not found.optimal


def test_batches_that_look_alike_are_all_kept_within_the_limit() -> None:
    # The peak of the last one was taken for that of all whose first tensors had its shape.
    device = devices()
    light, heavy = (shapes_of(SIZES[:1], (0.5,), device)[0] for _ in range(2))
    more = replace(heavy.profile, resident_bytes=heavy.profile.resident_bytes + 2**21)
    heavy = replace(heavy, profile=more)
    free = best_plan_of_mix([heavy, light], [TRAINING], device)
    limit = free.predicted.peak_bytes - 2**17
    for shapes in ([heavy, light], [light, heavy]):
        found = best_plan_of_mix(shapes, [TRAINING], devices(limit))
        assert max(step.peak_bytes for step in steps_of(found, shapes, devices(limit))) <= limit


def test_shapes_that_run_other_code_are_compared_by_their_own_plans() -> None:
    device = devices()
    shapes = shapes_of(SIZES[:2], (0.5, 0.5), device)
    # As if the short one did not run its last segment.
    short = shapes[1].model_desc
    shapes[1] = replace(shapes[1], model_desc=replace(short, segments=short.segments[:-1]))
    assert _mean_profile(shapes[0], shapes) is None
    found = best_plan_of_mix(shapes, [TRAINING], device)
    assert found.predicted.step_seconds == pytest.approx(mean_of(found, shapes, device))
    assert not found.optimal


def test_the_mean_is_that_of_each_place_though_several_run_the_same() -> None:
    # One that is slower than its like made all of them slower by a part.
    shapes = shapes_of(SIZES[:2], (0.5, 0.5), devices())
    desc, profile = shapes[0].model_desc, shapes[0].profile
    first = next(
        segment
        for segment in desc.segments
        if sum(each.signature == segment.signature for each in desc.segments) > 1
    )
    usual = profile.of(first)
    slow = replace(usual, forward=replace(usual.forward, seconds=3.0), keys=(first.key,))
    shapes[0] = replace(shapes[0], profile=replace(profile, segments=(*profile.segments, slow)))
    found = _mean_profile(shapes[0], shapes)
    assert found is not None
    other = {s.key: shapes[1].profile.of(s) for s in shapes[1].model_desc.segments}
    for segment in desc.segments:
        both = shapes[0].profile.of(segment), other[segment.key]
        assert found.of(segment).forward.seconds == pytest.approx(sum(p.forward.seconds for p in both) / 2)


def test_what_a_search_has_proven_of_one_shape_is_not_told_of_the_mix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_open_bound(problem: Any, limit: int, **options: Any) -> Any:
        found, bound = solve_bounded(problem, limit, **options)
        return found, bound * 0.9

    monkeypatch.setattr(planner, "solve_bounded", with_open_bound)
    device = devices()
    shapes = shapes_of(SIZES[:2], (0.5, 0.5), device)
    found = best_plan_of_mix(shapes, [TRAINING], device)
    assert not found.optimal
    assert not any(note.startswith(PROVEN_WITHIN) for note in found.notes)
    training = replace(TRAINING, local_batch=shapes[0].profile.local_batch)
    candidates = [Candidate(training, shapes[0].profile)]
    alone = best_plan(shapes[0].model_desc, candidates, device)
    assert any(note.startswith(PROVEN_WITHIN) for note in alone.notes)


def test_nothing_fits_the_largest() -> None:
    device = devices(2**19)
    with pytest.raises(InfeasibleError, match=r"nothing fits the memory limit of 512\.00 KiB"):
        best_plan_of_mix(shapes_of(SIZES, (0.2, 0.4, 0.4), device), [TRAINING], device)


def test_nothing_fits_another_shape_though_the_largest_fits() -> None:
    """A limit below zero was planned for on the way, which is no limit."""
    shapes = shapes_of(SIZES[:2], (0.5, 0.5), devices())
    limit = 2 * best_plan_of_mix(shapes, [TRAINING], devices()).predicted.peak_bytes
    heavy = replace(shapes[1].profile, resident_bytes=3 * limit)
    with pytest.raises(InfeasibleError, match="leave out batches of"):
        best_plan_of_mix([shapes[0], replace(shapes[1], profile=heavy)], [TRAINING], devices(limit))


def test_what_a_mix_is() -> None:
    assert BatchMix([1, 2], [3.0, 1.0]).shares == (0.75, 0.25) and BatchMix([1, 2]).shares == (0.5, 0.5)
    for batches, weights, said in (
        ([], [], "at least one"),
        ([1], [1.0, 2.0], "2 weights do not fit 1"),
        ([1], [0.0], "must be positive"),
        ([1, 2], [1.0, float("inf")], "and finite, got inf"),
    ):
        with pytest.raises(ValueError, match=said):
            BatchMix(batches, weights)
    mix = BatchMix([batch(2, 8), batch(2, 4)])
    model = CASE.model(device="meta")
    for options, said in (
        ({"global_batch": 8}, "global_batch chooses a batch"),
        ({"local_batches": [2]}, "local_batches chooses a batch"),
        ({"pp": 2, "dp": 1}, "planned for one shape"),
        ({"training": Training(local_batch=8)}, "leave local_batch= of the training out"),
        ({"start": "estimated"}, "a BatchMix is measured first"),
        ({"dp": 3}, "dp=3 does not fit device_info"),
    ):
        with pytest.raises(ValueError, match=said):
            make_plan(model, mix, devices(), **options)  # type: ignore[arg-type]
    desc = ModelDesc.from_module(model, batch(2, 8))
    with pytest.raises(ValueError, match="needs a profile of each"):
        make_plan(None, mix, devices(), profile=estimate(desc, devices(), replace(TRAINING, local_batch=2)))


def trains() -> tuple[list[str], list[float]]:
    """Measured, on batches of the mix without a word, and with one on a longer batch."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    mix = BatchMix([batch(2, 16), batch(4, 4)], [1, 3])
    model = OSDP(CASE.model(), mix, replace(given_device(2), memory_limit=2**30))
    assert model.plan.measured_profile and model.plan.batch_shapes == ((2, 16), (4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    logging.getLogger("osdp").addHandler(handler)
    losses = []
    for samples, length in ((2, 16), (4, 4), (1, 9), (4, 8), (2, 32)):
        optimizer.zero_grad()
        loss = loss_of(model(**batch(samples, length)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    logging.getLogger("osdp").removeHandler(handler)
    assert dist.get_world_size() == 2
    return said, losses


def test_a_model_trains_on_a_mix() -> None:
    (told, losses), (silent, same) = run(2, trains, timeout=100)
    assert losses == same and silent == []
    assert len(told) == 1 and told[0].startswith("a batch is 2 x 32, the plan was made for 2 x 16 and 4 x 4:")
    assert "osdp.BatchMix of all" in told[0]


def trains_on_packed_rows() -> None:
    """Rows of 16 and of 8 tokens, each of two sequences whose lengths are values of the batch."""

    def packed(seed: int, samples: int, length: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return opaque_models.batch("packed", samples, generator, length=length, vocab=23)

    def mean_loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    mix = BatchMix([packed(0, 2, 16), packed(1, 4, 8)], [1, 3])
    device = replace(given_device(2), memory_limit=2**30)
    model = OSDP(build("packed"), mix, device, loss_fn=mean_loss)
    assert [module.name for module in ModelDesc.from_module(build("packed"), packed(0, 2, 16)).opaque]
    assert model.plan.batch_shapes == ((2, 16), (4, 8))
    reference = build("packed")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for step, sizes in enumerate(((2, 16), (4, 8), (1, 16), (3, 8))):
        batches = [packed(10 * step + rank, *sizes) for rank in range(2)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_loss(model(**batches[dist.get_rank()])).backward()
        (sum(mean_loss(reference(**each)) for each in batches) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in model.named_parameters():
        assert difference(whole(parameter.detach()), reference.get_parameter(name)) < 1e-9, name


def test_packed_rows_of_several_lengths_train_as_in_a_single_process() -> None:
    run(2, trains_on_packed_rows, timeout=100)
