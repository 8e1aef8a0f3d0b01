"""Memory and time of one tensor-parallel rank: predicted and measured."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.support.memory_oracle import Step, fake_group, measure_peak
from osdp import OSDP, DeviceInfo, Link, ModelDesc
from osdp.api import make_plan
from osdp.cost.tensor_parallel import part_profile
from osdp.hardware.device_info import COLLECTIVES
from osdp.hardware.profile import Profile
from osdp.model.training import Training
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.plan.tensor_parallel_rank import rank_desc
from osdp.profiler.roofline import estimate
from osdp.runtime.mesh import parallel_mesh
from tests.helpers.distributed import run

pytest.importorskip("transformers")

from tests.helpers.transformer_models import batch_of, build

TRAINING = Training(local_batch=2)
VOCABULARY = 2001


def device(latency: float = 1e-6, bandwidth: float = 1e10, dp: int = 1) -> DeviceInfo:
    """Devices that a network of some speed joins inside layers, and a fast one between replicas."""
    return DeviceInfo(
        memory_limit=2**40,
        devices_per_node=dp,
        links=tuple(Link(name, "world", dp, 1e-6, 1e10) for name in COLLECTIVES),
        tensor_links=tuple(Link(name, "tensor", 2, latency, bandwidth) for name in COLLECTIVES),
        flops=1e9,
        memory_bandwidth=1e10,
    )


def even_batch_of(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor[:, :8].contiguous() for key, tensor in batch_of(name, VOCABULARY).items()}


def planned(
    name: str, info: DeviceInfo, layout: ParallelDims, whole: bool = True, sequence_parallel: bool = False
) -> Plan:
    model, batch = build(name, VOCABULARY), even_batch_of(name)
    desc = ModelDesc.from_module(model, batch)
    profile: Profile | None = estimate(desc, info, TRAINING) if whole else None
    return make_plan(
        model, batch, info, pp=layout.pp, dp=layout.dp, tp=layout.tp, training=TRAINING, profile=profile,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def states_on_two_ranks(name: str, plan: Plan) -> None:
    model = OSDP(build(name, VOCABULARY), plan=plan)
    optimizer = torch.optim.AdamW(model.parameters())
    model.train_step(even_batch_of(name))
    optimizer.step()
    held = [state for states in optimizer.state.values() for state in states.values()]
    stored = sum(local(tensor).nbytes for tensor in [*model.parameters(), *held])
    gradients = sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    if dist.get_rank() == 0:  # of an uneven vocabulary it has the largest part
        assert plan.predicted.state_bytes == stored, name
        assert gradients == sum(local(p).nbytes for p in model.parameters()), name
    whole = sum(p.numel() for p in build(name, VOCABULARY).parameters())
    assert sum(d.nbytes for s in plan.stages for d in s.sharding.decisions) == 4 * whole


def states(plans: dict[str, Plan]) -> None:
    for name, plan in plans.items():
        states_on_two_ranks(name, plan)


def test_states_are_those_of_the_local_parts() -> None:
    plans = {name: planned(name, device(), ParallelDims(1, 1, 2)) for name in ("gpt2", "qwen3")}
    run(2, states, plans, timeout=120)


@pytest.mark.parametrize(
    ("name", "dp", "whole", "sequence_parallel"),
    [
        ("gpt2", 1, True, False),
        ("llama", 2, False, False),
        ("llama", 1, False, True),
        ("bert", 1, True, True),
    ],
)
def test_no_more_memory_is_taken_than_predicted(
    name: str, dp: int, whole: bool, sequence_parallel: bool
) -> None:
    torch.set_num_threads(1)
    layout = ParallelDims(1, dp, 2)
    with fake_group(2 * dp):
        plan = planned(name, device(dp=dp), layout, whole, sequence_parallel)

        def build_step() -> Step:
            net = build(name, VOCABULARY)
            model = OSDP(net, plan=plan, mesh=parallel_mesh(net, layout))
            optimizer, batch = torch.optim.AdamW(model.parameters()), even_batch_of(name)

            def step() -> None:
                optimizer.zero_grad(set_to_none=True)
                model.train_step(batch)
                optimizer.step()

            return step

        peak = measure_peak(build_step).peak
    assert peak <= plan.predicted.peak_bytes <= 1.1 * peak, (peak, plan.predicted.peak_bytes)


def seconds(info: DeviceInfo, tp: int) -> float:
    return planned("llama", info, ParallelDims(1, 1, tp)).predicted.step_seconds


def test_fast_links_make_steps_shorter_and_slow_ones_longer() -> None:
    alone = seconds(device(), 1)
    assert seconds(device(), 2) < 0.8 * alone
    slow = planned("llama", device(latency=1e-2, bandwidth=1e6), ParallelDims(1, 1, 2))
    assert slow.predicted.step_seconds > alone
    assert slow.predicted.communication_seconds > slow.predicted.compute_seconds


def test_segments_that_a_profile_tells_apart_are_told_apart_in_its_parts() -> None:
    """The first of several with a signature stood for all of them in each rank's part."""
    whole = ModelDesc.from_module(build("llama", VOCABULARY), even_batch_of("llama"))
    profile = estimate(whole, device(), TRAINING)
    name = max((s.signature for s in whole.segments), key=[s.signature for s in whole.segments].count)
    alike = [segment for segment in whole.segments if segment.signature == name]
    most = profile.by_signature[name]
    frees = replace(most, forward=replace(most.forward, live_bytes=-1), keys=(alike[0].key, alike[-1].key))
    profile = replace(profile, segments=(*profile.segments, frees))
    found = part_profile(whole, profile, rank_desc(whole, whole, TensorParallelPlan("llama", 2, ()), {}))
    lives = [found.of(segment).forward.live_bytes for segment in alike]
    assert lives == [-1, *[most.forward.live_bytes] * (len(alike) - 2), -1]


def test_links_that_are_unknown_are_named() -> None:
    with pytest.raises(ValueError, match="knows no all_reduce in tensor-parallel groups"):
        planned("llama", replace(device(), tensor_links=()), ParallelDims(1, 1, 2))


def test_a_plain_model_has_nothing_to_share() -> None:
    net = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    with pytest.raises(ValueError, match="nothing of Sequential can be sharded over 2 ranks"):
        make_plan(net, torch.zeros(2, 8), device(), pp=1, dp=1, tp=2, training=TRAINING)
