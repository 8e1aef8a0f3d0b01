"""Plans for Muon: what its matrices keep and take, and which ranks orthogonalize them."""

import logging
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.candidates import given_device
from benchmarks.support.models import CASES, loss_of
from osdp import OSDP, DeviceInfo, ModelDesc, Training, codec, make_plan
from osdp.cost.matrix_steps import state_bytes, step_of_matrices, stepped_whole, temporary_bytes
from osdp.cost.sharding.problem import build_problem, with_links
from osdp.cost.sharding.shard_groups import ShardGroup
from osdp.hardware.device_info import Link
from osdp.hardware.profile import MatrixProfile, OptimizerProfile
from osdp.model.description import Operator, Parameter
from osdp.plan.plan import Plan
from osdp.plan.sharding import MatrixStep, Mode
from osdp.profiler.roofline import estimate
from tests.helpers.distributed import run
from tests.helpers.settings import setting_of

MUON = Training(matrix_optimizer="Muon", local_batch=2)
ADAMW = Training(local_batch=2)


def operator(*shapes: tuple[int, ...], block: str | None = "blocks.0", trainable: bool = True) -> Operator:
    parameters = tuple(
        Parameter(f"op.p{index}", shape, "float32", trainable) for index, shape in enumerate(shapes)
    )
    return Operator("op", ("op",), parameters, block, 0, 0, False)


def test_muon_steps_the_matrices_of_blocks() -> None:
    inside = operator((8, 4), (8,), (2, 3, 3))
    assert [p.name for p in stepped_whole(inside, MUON)] == ["op.p0"]
    assert not stepped_whole(inside, ADAMW)
    assert not stepped_whole(operator((8, 4), block=None), MUON)  # an embedding or a head
    assert not stepped_whole(operator((8, 4), trainable=False), MUON)


def test_a_matrix_keeps_one_state_and_all_else_two() -> None:
    sizes = {"op.p0": 128, "op.p1": 32}
    inside = operator((8, 4), (8,))
    # AdamW counts steps, in 4 bytes a parameter.
    assert state_bytes(inside, ADAMW, sizes) == 2 * (128 + 32) + 2 * 4
    assert state_bytes(inside, MUON, sizes) == 1 * 128 + 2 * 32 + 4
    assert state_bytes(operator((8, 4), (8,), block=None), MUON, sizes) == 2 * (128 + 32) + 2 * 4


def test_temporaries_are_those_of_a_portion() -> None:
    small = operator((8, 4), (2, 4))
    assert temporary_bytes([small], ADAMW, 2) == 0
    assert temporary_bytes([small], MUON, 2) == 4 * 2 * (32 + 8) + 6 * 2 * 32
    # Not of all matrices of a large model: of about 64 MiB, or of one matrix for each rank.
    large = operator(*[(4096, 4096)] * 100)
    matrix = 2 * 4096 * 4096
    assert temporary_bytes([large], MUON, 2) == 4 * (2**26 + matrix) + 6 * matrix
    assert temporary_bytes([large], MUON, 64) == 4 * 64 * matrix + 6 * matrix


def shard_group(bandwidth: float, latency: float = 0.0, ranks: int = 4) -> ShardGroup:
    link = Link("all_gather", "world", ranks, latency, bandwidth)
    return ShardGroup(ranks, link, link, link)


@pytest.mark.parametrize("in_shards", [True, False])
def test_owners_are_worth_their_messages_or_not(in_shards: bool) -> None:
    inside = operator((100, 10), (10,))
    flops = 5 * (4 * 10 * 10 * 100 + 2 * 10**3)
    step = OptimizerProfile(0.0, 0.0, 0.0, matrices=MatrixProfile(1e-3, 1e-8))
    work, nbytes = 1e-3 + 1e-8 * flops, 2 * 1000

    def found(
        group: ShardGroup, model_bytes: float = inside.nbytes, owners: int = 4, training: Training = MUON
    ) -> tuple[float, MatrixStep | None]:
        return step_of_matrices(inside, training, step, group, model_bytes, owners, in_shards=in_shards)

    sent = nbytes / 1e9
    for owners in (4, 3):  # with fewer matrices than ranks some of them own none
        owned = work / owners + (2 * sent / 4 if in_shards else sent)
        assert found(shard_group(1e9), owners=owners) == (pytest.approx(owned), MatrixStep.OWNED)
    # Sharded matrices have to be sent in any case: once if all orthogonalize them. Whole ones are not left
    # to all, whose copies would drift apart.
    late = shard_group(1e12, latency=1.0)
    seconds, chosen = found(late, model_bytes=2.0 * inside.nbytes)
    latency = 0.5 * 4000 / 4040
    assert chosen is (MatrixStep.GATHERED if in_shards else MatrixStep.OWNED)
    assert seconds == pytest.approx(work / (1 if in_shards else 4) + latency, rel=1e-3)
    assert found(shard_group(1e9, ranks=1)) == (pytest.approx(work), MatrixStep.GATHERED)
    assert found(late, training=ADAMW) == (0.0, None)


def test_a_profile_that_knows_no_matrices_is_refused() -> None:
    device = replace(given_device(4), flops=1e10, memory_bandwidth=1e10)
    desc = setting_of(CASES["gpt2-tiny"], ADAMW).model_desc
    with pytest.raises(ValueError, match=r"does not say how long Muon takes .*matrix_optimizer='Muon'"):
        make_plan(None, desc, device, training=MUON, profile=estimate(desc, device, ADAMW))


def plans_of(training: Training, device: DeviceInfo, model_desc: ModelDesc) -> dict[str, Plan]:
    profile = estimate(model_desc, device, training)
    return {
        strategy: make_plan(None, model_desc, device, training=training, profile=profile, strategy=strategy)
        for strategy in ("NO_SHARD", "FULL_SHARD")
    }


def test_plans_say_how_matrices_are_stepped_and_count_one_state_less() -> None:
    device = replace(given_device(4), flops=1e10, memory_bandwidth=1e10)
    desc = setting_of(CASES["gpt2-tiny"], ADAMW).model_desc
    by_muon, by_adamw = (plans_of(training, device, desc) for training in (MUON, ADAMW))
    matrices = {op.name: sum(p.nbytes for p in stepped_whole(op, MUON)) for op in desc.operators}
    assert sum(matrices.values()) > 2**18
    for strategy, share in (("NO_SHARD", 1), ("FULL_SHARD", 4)):
        muon, adamw = by_muon[strategy], by_adamw[strategy]
        for decision in muon.decisions:
            assert (decision.matrix_step is not None) == (matrices[decision.operator] > 0), decision.operator
        assert all(decision.matrix_step is None for decision in adamw.decisions)
        less = adamw.predicted.state_bytes - muon.predicted.state_bytes
        assert less == pytest.approx(sum(matrices.values()) / share, rel=0.02)
        assert muon.predicted.optimizer_seconds > adamw.predicted.optimizer_seconds
        assert "Muon for matrices of blocks and AdamW" in str(muon)
        assert codec.from_json(Plan, codec.to_json(muon)) == muon


def test_matrices_are_sent_over_the_links_that_are_exchanged() -> None:
    """Problems with other links kept the seconds that matrices took on the former ones."""
    device = replace(given_device(4), flops=1e10, memory_bandwidth=1e10)
    slow = replace(device, links=tuple(replace(each, bandwidth=each.bandwidth / 10) for each in device.links))
    desc = setting_of(CASES["gpt2-tiny"], ADAMW).model_desc
    profile = estimate(desc, device, MUON)
    before, after = (build_problem(desc, profile, links, MUON) for links in (device, slow))
    moved = with_links(before, slow)
    assert moved.costs.matrices_sharded[-1] > before.costs.matrices_sharded[-1]
    for one, two in zip(moved.costs.by_group, after.costs.by_group, strict=True):
        assert list(one.matrices_sharded) == list(two.matrices_sharded)
        assert list(one.matrices_whole) == list(two.matrices_whole)


def refused_beside(model: OSDP) -> None:
    """What needs more than planned is refused where the limit does not allow it."""
    spare = model.plan.memory_limit - model.plan.predicted.peak_bytes
    torch.optim.SGD(model.parameters(), lr=0.0).step()  # keeps less
    check = model._optimizer_check
    adamw, muon = (
        torch.optim.AdamW(model.parameters()),
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]),  # with embeddings
    )
    assert check._matrix_differences(adamw, ADAMW, spare) == []
    (difference,) = check._matrix_differences(adamw, ADAMW, 0)
    assert "AdamW steps 8 matrices that the plan leaves to Muon" in difference
    assert check._matrix_differences(muon, MUON, 0) == []
    tight = replace(model.plan, memory_limit=model.plan.predicted.state_bytes + 2**10)
    with mock.patch.object(check._running, "plan", tight):
        (difference,) = check._matrix_differences(muon, MUON, 0)
    assert "the limit leaves 1024" in difference


def trains_as_planned() -> tuple[list[str], list[str]]:
    """With the two optimizers that were planned for, without a word; AdamW for all is refused."""
    case = CASES["gpt2-tiny"]
    sample, device = case.sample(2), replace(given_device(2), memory_limit=2**30)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("osdp").addHandler(handler)
    steps = []
    for strategy in (None, "FULL_SHARD"):
        model = OSDP(case.model(), sample, device, training=MUON, strategy=strategy)
        steps += [str(d.matrix_step) for d in model.plan.decisions if d.matrix_step is not None]
        names = {name for d in model.plan.decisions if d.matrix_step is not None for name in d.parameters}
        hidden = [p for name, p in model.named_parameters() if name in names and p.ndim == 2]
        assert len(hidden) == 2 * 4
        others = [p for p in model.parameters() if all(p is not one for one in hidden)]
        said.clear()
        loss_of(model(**sample)).backward()
        for optimizer in (torch.optim.Muon(hidden), torch.optim.AdamW(others)):
            optimizer.step()
        assert said == [], said
        refused_beside(model)
    logging.getLogger("osdp").removeHandler(handler)
    modes = sorted({str(d.mode) for d in model.plan.decisions if d.mode is not Mode.NO_SHARD})
    assert dist.get_world_size() == 2
    return steps, modes


def test_a_searched_plan_for_muon_trains() -> None:
    (steps, modes), _ = run(2, trains_as_planned, timeout=100)
    assert len(steps) == 2 * 8 and "FULL_SHARD" in modes
