"""States in host memory: taken only where nothing else fits, priced by the way there, said in the plan.

Host and device are the same memory on a CPU, so what runs here runs without a second one.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp import OSDP, DeviceInfo, ModelDesc, Training, codec, make_plan
from osdp.cost.evaluate import evaluate
from osdp.cost.sharding.problem import build_problem
from osdp.errors import InfeasibleError
from osdp.hardware.device_info import HostLink
from osdp.hardware.profile import OptimizerProfile
from osdp.model.description import DTYPE_BYTES
from osdp.plan.plan import Plan
from osdp.plan.search_options import SearchOptions
from osdp.plan.shard_math import shard_numel
from osdp.plan.sharding import Mode, Unit
from osdp.profiler.roofline import estimate
from osdp.runtime.checkpoint import whole_state_dict
from osdp.search.sharding import planner as planning
from osdp.search.sharding.planner import Candidate, best_plan
from osdp.search.sharding.solve import min_peak
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import offload, plan_by_hand
from tests.helpers.problems import random_device, random_model
from tests.helpers.training import ALL_USED
from tests.test_parity import LAYOUTS

HOST_TOO = SearchOptions(offload=True)


def least_on_device(seed: int, **options: object) -> int:
    """The lowest peak with all states on the device."""
    model_desc, profile = random_model(seed, 3, 2)
    return int(
        -(-min_peak(build_problem(model_desc, profile, random_device(seed, **options), Training())) // 1)
    )


def plan_at(seed: int, limit: int, rules: SearchOptions = HOST_TOO, **options: object) -> Plan:
    model_desc, profile = random_model(seed, 3, 2)
    device = random_device(seed, memory_limit=limit, **options)
    return best_plan(model_desc, [Candidate(Training(), profile)], device, rules)


def offloaded(plan: Plan) -> set[str]:
    return {operator for unit in plan.units if unit.offloaded for operator in unit.operators}


@pytest.mark.parametrize("seed", range(6))
def test_only_what_does_not_fit_the_device_goes_to_host_memory(seed: int) -> None:
    least = least_on_device(seed)
    assert not offloaded(plan_at(seed, least))
    with pytest.raises(InfeasibleError):
        plan_at(seed, least - 1, SearchOptions())
    just_below = plan_at(seed, least - 1)
    assert offloaded(just_below) and just_below.predicted.peak_bytes < least
    assert "host memory" in just_below.notes[-1] and "offloaded to host memory" in " ".join(
        str(just_below).split()
    )
    lowest = min_peak(
        build_problem(*random_model(seed, 3, 2), random_device(seed), Training()), options=HOST_TOO
    )
    tightest = plan_at(seed, int(-(-lowest // 1)))
    assert tightest.predicted.step_seconds >= just_below.predicted.step_seconds
    assert codec.from_json(Plan, codec.to_json(just_below)) == just_below


@pytest.mark.parametrize("seed", range(4))
def test_a_unit_in_host_memory_costs_its_way_there_and_back(seed: int) -> None:
    """By hand: shards come twice and gradients go once, and the host runs the optimizer."""
    model_desc, profile = random_model(seed, 2, 2)
    profile = replace(
        profile, optimizer=OptimizerProfile(0.0, 0.0, 0.0), host_optimizer=OptimizerProfile(0.0, 0.0, 3e-9)
    )
    host = HostLink(to_device=2e8, to_host=5e8, memory=2**40)
    device = random_device(seed, blocking=True, host=host)
    candidate = [Candidate(Training(), profile)]
    plan = best_plan(model_desc, candidate, device, SearchOptions(allowed=(Mode.FULL_SHARD,)))
    chosen = next(unit for unit in plan.units if unit.mode is Mode.FULL_SHARD and not unit.root)
    away = plan.with_sharding(units=tuple(replace(unit, offloaded=unit is chosen) for unit in plan.units))
    parameters = [p for name in chosen.operators for p in model_desc.operator(name).parameters]
    shards = sum(shard_numel(p.shape, device.world_size) * DTYPE_BYTES[p.dtype] for p in parameters)
    before, after = (evaluate(p, profile, device, Training(), model_desc) for p in (plan, away))
    expected = 2 * shards / host.to_device + shards / host.to_host + shards * 3e-9
    assert after.step_seconds - before.step_seconds == pytest.approx(expected, rel=1e-9)
    assert before.state_bytes - after.state_bytes == pytest.approx(3 * shards, abs=64)


def test_what_stands_in_the_way_of_host_memory_is_said() -> None:
    def why(rules: SearchOptions = HOST_TOO, **options: object) -> str:
        with pytest.raises(InfeasibleError) as caught:
            plan_at(0, 1, rules, **options)
        return str(caught.value)

    gpu = {"kind": "NVIDIA H200"}
    assert "what CPU devices hold is in host memory already" in why(host=None)
    assert "a measured DeviceInfo.host" in why(host=None, **gpu)
    assert "more host memory than 1 B" in why(host=HostLink(1e9, 1e9, 1), **gpu)
    assert "offload=True" in why(SearchOptions(), **gpu)
    assert "offload" not in why(**gpu)


def test_only_sharded_units_beside_the_root_can_live_in_host_memory() -> None:
    with pytest.raises(ValueError, match="unit of a is NO_SHARD: only sharded"):
        Unit(Mode.NO_SHARD, ("a",), ("a",), offloaded=True)
    with pytest.raises(ValueError, match="unit of a is the root's"):
        Unit(Mode.SHARD_GRAD_OP, ("a",), ("",), root=True, offloaded=True)
    with pytest.raises(ValueError, match="positive to_host"):
        HostLink(1.0, 0.0, 1)


def test_a_plan_with_host_memory_is_not_priced_without_knowing_it() -> None:
    plan = plan_at(1, least_on_device(1) - 1)
    model_desc, profile = random_model(1, 3, 2)
    with pytest.raises(ValueError, match=r"DeviceInfo\.host and a profile with a host_optimizer"):
        evaluate(plan, profile, random_device(1, host=None), Training(), model_desc)


def planned_and_trained() -> tuple[bool, float, float]:
    """Plan below what fits the device, train, and compare with the plain model."""
    torch.manual_seed(3)
    plain, batch = Scored(gated=False, depth=3), tokens(dist.get_rank(), 4, 6)
    torch.manual_seed(3)
    net = Scored(gated=False, depth=3)
    training = Training(local_batch=4)
    model_desc = ModelDesc.from_module(net, batch)
    links = random_device(0).links
    device = DeviceInfo(
        memory_limit=2**40,
        devices_per_node=2,
        links=tuple(replace(k, size=2) for k in links),
        host=HostLink(1e9, 1e9, 2**40, 1e10),
        flops=1e9,
        memory_bandwidth=1e9,
    )
    profile = estimate(model_desc, device, training)
    on_device = min_peak(
        build_problem(model_desc, profile, device, training),
        options=SearchOptions(slices=(2,), recompute=True),
    )
    tight = replace(device, memory_limit=int(on_device) - 1)
    plan = make_plan(None, model_desc, tight, training=training, profile=profile, slices=(2,))
    model = OSDP(net, plan=plan, **ALL_USED)
    for module in (plain, model):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(batch)
            loss.backward()
            if module is plain:
                for parameter in (p for p in plain.parameters() if p.grad is not None):
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                    parameter.grad /= dist.get_world_size()
                nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            else:
                model.clip_grad_norm_(0.5)
            optimizer.step()
    return bool(offloaded(plan)), plain(batch).item(), model(batch).item()


class Scored(Net):
    """Its own loss."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(super().forward(batch), batch)


def test_a_plan_with_host_memory_trains_and_clips() -> None:
    for any_offloaded, want, got in run(2, planned_and_trained):
        assert any_offloaded
        assert got == pytest.approx(want, rel=1e-5)


def meta_and_checkpoint() -> float:
    """A model built on meta under an offloaded plan starts from the values of one that is not offloaded."""
    modes, groups = LAYOUTS["mixed blocks"]
    states = []
    for away in (False, True):
        torch.manual_seed(5)
        with torch.device("meta"):
            net = Net(gated=False)
        plan = plan_by_hand(net, modes, dist.get_world_size(), groups=groups)
        model = OSDP(net, plan=offload(plan) if away else plan, **ALL_USED)
        loss_of(model(tokens(0, 2, 6)), tokens(0, 2, 6)).backward()
        states.append(whole_state_dict(model))
    if dist.get_rank():
        return 0.0
    assert states[0].keys() == states[1].keys() and states[0]
    return max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0])


def test_models_on_meta_start_from_the_same_values() -> None:
    assert max(run(2, meta_and_checkpoint)) == 0.0


def test_what_the_host_has_no_room_for_leaves_open_what_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twice the batch the fastest plan does not fit the host, and none that offloads less was sought."""
    model_desc, profile = random_model(0, 3, 2)
    device = random_device(0, memory_limit=least_on_device(0) - 1)
    candidates = [
        Candidate(Training(local_batch=batch), replace(profile, local_batch=batch)) for batch in (2, 1)
    ]
    assert best_plan(model_desc, candidates, device, HOST_TOO).local_batch == 2
    monkeypatch.setattr(
        planning, "_host_bytes", lambda problem, found: 2.0**50 * (problem.profile.local_batch == 2)
    )
    plan = best_plan(model_desc, candidates, device, HOST_TOO)
    assert plan.local_batch == 1 and not plan.optimal
    assert any("proven to be within" in note for note in plan.notes)
