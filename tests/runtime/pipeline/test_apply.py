"""Models in stages: what a step computes, against a single process; refusals; checkpoints."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from osdp import OSDP, DeviceInfo, Link, ModelDesc, Training, codec
from osdp.api import make_plan
from osdp.comm.objects import on_first_rank
from osdp.errors import PlanMismatchError
from osdp.hardware.device_info import PointToPointLink
from osdp.options import usable_schedules
from osdp.plan.dims import ParallelDims, degrees
from osdp.plan.plan import Plan
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import Mode
from osdp.profiler.roofline import estimate
from osdp.runtime import checkpoint
from osdp.runtime.mesh import parallel_mesh
from osdp.search.pipeline.planner import plan_at
from osdp.search.sharding.planner import Candidate
from osdp.tracing.dataflow import trace_flow
from osdp.tracing.sample_batch import SampleBatch
from tests.helpers import distributed
from tests.helpers.stage_nets import VOCAB, WIDTH, LateTiedNet, TiedNet, batch, loss_fn, targets

ALONE = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
SAMPLES, PARTS = 10, 4
#: Tokens of sequences whose activations are larger than the random state that a recomputed block keeps.
LONG = 64
RECOMPUTE = SearchOptions(recompute=True)


def devices(dp: int, memory_limit: int = 2**30) -> DeviceInfo:
    links = tuple(
        Link(name, "world", dp, 1e-4, 1e8) for name in ("all_gather", "reduce_scatter", "all_reduce")
    )
    # Nothing is measured: which rank has which stage must not depend on how busy the machine is.
    return DeviceInfo(
        memory_limit=memory_limit, devices_per_node=dp, links=links, flops=1e9, memory_bandwidth=1e9,
        stage_link=PointToPointLink(1e-4, 1e8),
    )  # fmt: skip


def wrapped(model: nn.Module, **options: Any) -> OSDP:
    layout = {name: options[name] for name in ("pp", "dp", "tp") if name in options}
    dp = options.get("dp", dist.get_world_size() // (layout.get("pp", 1) * layout.get("tp", 1)))
    training = Training(
        local_batch=SAMPLES // PARTS // dp or 1, microbatches=PARTS, param_dtype=options.pop("dtype", None)
    )
    assert training.local_batch is not None
    model_desc = on_first_rank(partial(ModelDesc.from_module, model, batch(training.local_batch)))
    device = devices(dp)
    profile = estimate(model_desc, device, training)
    return OSDP(model, model_desc, device, training=training, profile=profile, **options)


def net(seed: int = 0, **options: Any) -> TiedNet:
    torch.manual_seed(seed)
    return TiedNet(**options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def single_step(model: nn.Module, samples: int, length: int) -> float:
    total, count = loss_fn(model(**batch(samples, length)), targets(samples, length))
    (total / count).backward()
    return float(total.detach() / count)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def check_steps(options: dict[str, Any], limit: float = 1e-5) -> None:
    """Three steps with an optimizer, of other lengths and numbers of samples, against a single process."""
    compare_steps(net(), wrapped(net(), **options), options, limit)


def compare_steps(reference: nn.Module, model: OSDP, options: dict[str, Any], limit: float = 1e-5) -> None:
    world = dist.get_world_size()
    dp = options.get("dp", world // (options.get("pp", 1) * options.get("tp", 1)))
    where = dist.get_rank() // options.get("tp", 1) % dp
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for samples, length in ((SAMPLES, 5), (2 * SAMPLES, 5), (SAMPLES, 7)):
        mine = slice(where * samples // dp, (where + 1) * samples // dp)
        inputs = {name: value[mine] for name, value in batch(samples, length).items()}
        want = single_step(reference, samples, length)
        got = model.train_step(inputs, targets(samples, length)[mine], loss_fn)
        assert abs(float(got) - want) < limit * want, (options, "loss")
        gradients = dict(reference.named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters():
            wanted = gradients[name].grad
            assert parameter.grad is not None and wanted is not None
            assert difference(whole(parameter.grad), wanted) < limit, (options, name)
        norm = model.clip_grad_norm_(0.1)
        wanted_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert abs(float(norm) / float(wanted_norm) - 1) < limit, (options, "norm")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    check_inference(model, reference, where, dp, limit)


def check_inference(model: OSDP, reference: nn.Module, where: int, dp: int, limit: float) -> None:
    mine = slice(where * SAMPLES // dp, (where + 1) * SAMPLES // dp)
    inputs = {name: value[mine] for name, value in batch(SAMPLES).items()}
    with torch.no_grad():
        logits = reference(**batch(SAMPLES))
        total, count = loss_fn(logits, targets(SAMPLES))
    assert difference(model.predict(inputs), logits[mine]) < 10 * limit
    evaluated = model.eval_step(inputs, targets(SAMPLES)[mine], loss_fn)
    assert abs(float(evaluated) / float(total / count) - 1) < 10 * limit


def stages_alone() -> None:
    for schedule in ALONE:
        check_steps({"pp": 2, "schedule": schedule})
    check_steps({"pp": 2, "mode": "1f1b", "dtype": "bfloat16"}, limit=0.15)
    check_steps({})
    mesh = parallel_mesh(net(), ParallelDims(1, 2, 1))
    check_steps({"mesh": mesh})  # data parallelism alone, on a mesh that has the other axes, too
    check_frozen_tie()
    check_groups_by_name()
    check_autocast()
    check_means()
    check_scaler()


def check_frozen_tie() -> None:
    """It got gradients of zero, and so the optimizer's weight decay."""
    frozen = net()
    frozen.embed.weight.requires_grad_(False)
    model = wrapped(frozen, pp=2, schedule="1f1b")
    model.train_step(batch(SAMPLES), targets(SAMPLES), loss_fn)
    assert all((p.grad is None) == (not p.requires_grad) for p in model.parameters())

    model = wrapped(net(), pp=2, schedule="1f1b")
    # As in a loop over a tied model's parameters: the head has another name on the rank that has it.
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.requires_grad_(False)
    for trained in (False, True):
        model.train_step(batch(SAMPLES), targets(SAMPLES), loss_fn)
        tied = [p for name, p in model.named_parameters() if name in ("embed.weight", "head.weight")]
        assert tied and all(p.requires_grad is trained and (p.grad is not None) is trained for p in tied)
        model.zero_grad()
        if dist.get_rank() and not trained:
            tied[0].requires_grad_(True)


def check_groups_by_name() -> None:
    """The head's copy of the embedding was decayed, since it has the head's name in its stage."""
    model = wrapped(net(), pp=2, schedule="1f1b")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if (n == "embed.weight") is kept], "weight_decay": decay}
        for kept, decay in ((True, 0.0), (False, 0.1))
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)
    for decays in ((0.0, 0.1), (0.1, 0.1)):
        for group in optimizer.param_groups:
            others = any(p.shape != (VOCAB, WIDTH) for p in group["params"]) or dist.get_rank() > 0
            group["weight_decay"] = decays[others]
        model.train_step(batch(SAMPLES), targets(SAMPLES), loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        if decays[0] != decays[1]:
            with pytest.raises(
                RuntimeError, match=r"'embed\.weight'.*weight_decay=0\.0 and .*weight_decay=0\.1"
            ):
                model.train_step(batch(SAMPLES), targets(SAMPLES), loss_fn)
    model.train_step(batch(SAMPLES), targets(SAMPLES), loss_fn)


def check_autocast() -> None:
    """Stages sent bfloat16 where float32 had been agreed on, and received noise."""
    model, reference = wrapped(net(), pp=2, schedule="1f1b"), net()
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), torch.no_grad():
            got = float(model.eval_step(batch(SAMPLES), targets(SAMPLES), loss_fn))
            total, count = loss_fn(reference(**batch(SAMPLES)), targets(SAMPLES))
        assert got == pytest.approx(float(total / count), rel=1e-2 if enabled else 1e-5)


def check_scaler() -> None:
    """An infinite gradient of one stage: no stage steps, and all halve their scale."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model, reference = wrapped(net(), pp=2, schedule="1f1b"), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))

    def scaled(output: Any, wanted: torch.Tensor) -> Any:
        total, count = loss_fn(output, wanted)
        return scaler.scale(total), count

    for step in range(3):
        optimizer.zero_grad()
        loss = float(model.train_step(batch(SAMPLES), targets(SAMPLES), scaled)) / scaler.get_scale()
        if not step:
            assert abs(loss - single_step(reference, SAMPLES, 5)) < 1e-4 * loss
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if step == 1 and dist.get_rank() == 0:
            next(parameter for parameter in model.parameters()).grad.fill_(torch.inf)
        scaler.unscale_(optimizer)
        if not step:
            gradients = dict(reference.named_parameters(remove_duplicate=False))
            for name, parameter in model.named_parameters():
                assert difference(parameter.grad, gradients[name].grad) < 1e-4, name
        scaler.step(optimizer)
        scaler.update()
        stepped = any(not torch.equal(one, p) for one, p in zip(before, model.parameters(), strict=True))
        assert stepped is (step != 1), step
    assert scaler.get_scale() == 512.0


class Summed(TiedNet):
    """Returns its mean as well, and something of its own."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
        logits = super().forward(tokens, mask)
        return {"logits": logits, "mean": logits.mean(), "own": object(), "size": 3}


def check_means() -> None:
    torch.manual_seed(0)
    model = wrapped(Summed(), pp=2, schedule="1f1b")
    got = model.predict(batch(SAMPLES))
    assert float(got["mean"]) == pytest.approx(float(got["logits"].mean()), rel=1e-4)
    assert got["own"] is None and got["size"] == 3


def test_stages_train_as_a_single_process_under_every_schedule() -> None:
    distributed.run(2, stages_alone, timeout=120)


def check_call(**options: Any) -> None:
    """One stage is called as any model is, and its backward leaves the mean of the ranks' gradients."""
    reference, model = net(), wrapped(net(), **options)
    dp = model.mesh["dp"].size()
    where = model.mesh["dp"].get_local_rank()
    mine = slice(where * 8 // dp, (where + 1) * 8 // dp)
    logits = model(**{name: value[mine] for name, value in batch(8).items()})
    wanted = reference(**batch(8))
    assert difference(logits.detach(), wanted[mine].detach()) < 1e-5
    logits.square().sum().backward()
    (wanted.square().sum() / dp).backward()
    gradients = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        wanted_gradient = gradients[name].grad
        assert parameter.grad is not None and wanted_gradient is not None
        assert difference(whole(parameter.grad), wanted_gradient) < 1e-5, name


def late_tied() -> LateTiedNet:
    torch.manual_seed(0)
    return LateTiedNet()


def tied_on_one_rank(mode: Mode) -> str:
    """Stages 1 and 3 of four are on the second rank; the embedding is in one, the head in the other."""
    model, training = late_tied(), Training(local_batch=2, microbatches=PARTS)
    model_desc, flow = ModelDesc.from_module(model, batch(2)), trace_flow(model, SampleBatch.of(batch(2)))
    candidate = Candidate(training, estimate(model_desc, devices(2), training))
    bounds, layout = (0, 1, 3, 5, len(flow.steps)), ParallelDims(2, 2, 1)
    rules = SearchOptions(allowed=(mode,))
    plan = plan_at(bounds, model_desc, flow, candidate, devices(2), rules, layout, "interleaved")
    assert plan.ties[0].stages == (1, 3)
    return codec.to_json(plan)


def check_tie_on_one_rank(plan: Plan, path: str) -> None:
    staged = OSDP(late_tied(), plan=plan)
    compare_steps(late_tied(), staged, {"pp": 2, "dp": 2})
    # The optimizer's state of the owner serves both copies.
    optimizer = torch.optim.AdamW(staged.parameters(), lr=0.01)
    mine = slice(dist.get_rank() % 2 * 5, dist.get_rank() % 2 * 5 + 5)
    inputs = {name: value[mine] for name, value in batch(SAMPLES).items()}
    staged.train_step(inputs, targets(SAMPLES)[mine], loss_fn)
    optimizer.step()
    checkpoint.save(path, staged, optimizer)
    plain = late_tied()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    checkpoint.load(path, plain, plain_optimizer)
    again = OSDP(late_tied(), plan=plan)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
    checkpoint.load(path, again, optimizer)
    state = plain_optimizer.state[plain.embed.weight]["exp_avg"]
    for name, parameter in again.named_parameters():
        if name in ("embed.weight", "head.weight"):
            assert torch.equal(whole(parameter.detach()), plain.embed.weight.detach())
            assert torch.equal(whole(optimizer.state[parameter]["exp_avg"]), state)


def stages_beside_data(folder: str, tied: list[str]) -> None:
    for index, plan in enumerate(tied):
        check_tie_on_one_rank(codec.from_json(Plan, plan), f"{folder}/{index}")
    check_call(tp=2, dp=2, strategy="FULL_SHARD")
    for strategy in ("NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", None):
        check_steps({"pp": 2, "dp": 2, "schedule": "1f1b", "strategy": strategy})
    check_steps({"pp": 2, "schedule": "interleaved", "strategy": "FULL_SHARD"})
    check_steps({"pp": 4, "schedule": "gpipe"})
    check_steps({"pp": 2, "tp": 2})


def test_stages_beside_data_and_tensor_parallelism(tmp_path: Any) -> None:
    tied = [tied_on_one_rank(mode) for mode in (Mode.FULL_SHARD, Mode.NO_SHARD)]
    distributed.run(4, stages_beside_data, str(tmp_path), tied, timeout=180)


# -- dropout, meta, refusals ------------------------------------------------------------------------------


def halves(limit: int) -> Plan:
    """Two stages cut in the middle: only where the same rank computes a block does it draw the same."""
    model, training = net(dropout=0.5), Training(local_batch=2, microbatches=PARTS)
    sample = batch(2, LONG)
    model_desc, flow = ModelDesc.from_module(model, sample), trace_flow(model, SampleBatch.of(sample))
    middle = [step.module for step in flow.steps].index("blocks.2")
    candidate = Candidate(training, estimate(model_desc, devices(1), training))
    bounds, layout = (0, middle, len(flow.steps)), ParallelDims(2, 1, 1)
    return plan_at(bounds, model_desc, flow, candidate, devices(1, limit), RECOMPUTE, layout, "gpipe")


def gradients_with_dropout(plan: Plan) -> dict[str, torch.Tensor]:
    model = OSDP(net(dropout=0.5), plan=plan)
    torch.manual_seed(5)
    model.train_step(batch(SAMPLES, LONG), targets(SAMPLES, LONG), loss_fn)
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def empty() -> TiedNet:
    with torch.device("meta"):
        return TiedNet()


def check_initial_values(model: OSDP) -> None:
    """Each stage drew from the same seed: the first blocks of all stages were one block."""
    undivided = dict(wrapped(empty()).named_parameters())
    for name, parameter in model.named_parameters():
        if name not in ("embed.weight", "head.weight"):
            assert torch.equal(whole(parameter.detach()), whole(undivided[name].detach())), name


def draws_apart() -> None:
    """Three blocks on two stages: one of them drew more, and shuffled otherwise in the next epoch."""
    model = wrapped(net(layers=3, dropout=0.5), pp=2, schedule="1f1b")
    seeds: list[int] = []
    for block in model.module.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda *_: seeds.append(torch.initial_seed()))
    torch.manual_seed(3)
    for _ in range(2):
        order = torch.randperm(SAMPLES)
        inputs = {name: value[order] for name, value in batch(SAMPLES).items()}
        model.train_step(inputs, targets(SAMPLES)[order], loss_fn)
        model.zero_grad()
    found: list[Any] = [None] * 2
    dist.all_gather_object(found, (torch.get_rng_state().tolist(), set(seeds)))
    (one, drawn), (other, drawn_there) = found
    assert one == other
    assert len(drawn) == len(drawn_there) == 2 and not drawn & drawn_there


def dropout_and_meta() -> None:
    draws_apart()
    roomy = halves(2**30)
    # A limit that only recomputation meets; dropout must draw the same again.
    tight = halves(roomy.predicted.peak_bytes - 1)
    assert any(stage.sharding.recomputed for stage in tight.stages)
    kept, again = gradients_with_dropout(roomy), gradients_with_dropout(tight)
    assert kept.keys() == again.keys()
    for name, gradient in kept.items():
        assert torch.equal(gradient, again[name]), name
    model = wrapped(empty(), pp=2)
    check_initial_values(model)
    loss = model.train_step(batch(SAMPLES), targets(SAMPLES), loss_fn)
    assert torch.isfinite(loss)
    ends = [p for name, p in model.named_parameters() if name in ("embed.weight", "head.weight")]
    model = wrapped(empty(), pp=2, schedule="zb-v")
    if dist.get_rank() == 0:  # has the first stage and the last
        assert model.get_parameter("embed.weight") is model.get_parameter("head.weight")
    shared = ends[0].detach().clone()
    dist.broadcast(shared, src=0)
    assert torch.equal(shared, ends[0])


def test_dropout_is_drawn_again_and_meta_models_start_with_equal_ties() -> None:
    distributed.run(2, dropout_and_meta, timeout=120)


def refusals() -> None:
    model = wrapped(net(), pp=2, schedule="1f1b")
    with pytest.raises(RuntimeError, match="train_step"):
        model(**batch(2))
    with pytest.raises(ValueError, match="3 samples cannot be cut into 4"):
        model.train_step(batch(3), targets(3), loss_fn)
    with pytest.raises(RuntimeError, match="num_microbatches"):
        model.no_sync()
    with pytest.raises(ValueError, match="different batches"):
        model.train_step(batch(SAMPLES, seed=dist.get_rank()), targets(SAMPLES), loss_fn)
    model.train_step(batch(SAMPLES), targets(SAMPLES), loss_fn)
    with pytest.raises(RuntimeError, match="zero_grad"):
        model.train_step(batch(SAMPLES), targets(SAMPLES), loss_fn)
    model.zero_grad()
    # Also later than in the first step, in another order, and where one rank's alone cannot be cut.
    inputs = batch(SAMPLES)
    turned = {name: value.roll(dist.get_rank(), 0) for name, value in inputs.items()}
    for others in (batch(SAMPLES, seed=dist.get_rank()), turned, batch(SAMPLES - 7 * dist.get_rank())):
        with pytest.raises(ValueError, match="different batches"):
            model.train_step(others, targets(SAMPLES), loss_fn)
        with pytest.raises(ValueError, match="different batches"):
            model.eval_step(others, targets(SAMPLES), loss_fn)
    with pytest.raises(ValueError, match="is unknown; there are"):
        wrapped(net(), pp=2, schedule="round-robin")
    with pytest.raises(ValueError, match="two names of one option"):
        wrapped(net(), pp=2, schedule="1f1b", mode="gpipe")
    with pytest.raises(ValueError, match=r"pp=2 x dp=2 does not divide the 2 ranks"):
        wrapped(net(), pp=2, dp=2)
    with pytest.raises(PlanMismatchError, match="blocks"):
        OSDP(net(layers=2), plan=model.plan)
    with pytest.raises(PlanMismatchError, match="made for pp=2, asked for pp=1"):
        OSDP(net(), plan=model.plan, pp=1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="pp=2 does not fit a mesh with one axis of 2 ranks"):
        wrapped(net(), pp=2, mesh=mesh)
    plain = wrapped(net(), mesh=mesh)
    with pytest.raises(ValueError, match="there is no schedule 'round-robin'"):
        plain.train_step(batch(SAMPLES), targets(SAMPLES), loss_fn, schedule="round-robin")
    layer = wrapped(net(), tp=2)
    with pytest.raises(ValueError, match="different batches"):
        layer.train_step(batch(SAMPLES, seed=dist.get_rank()), targets(SAMPLES), loss_fn)


def test_what_stages_cannot_do_is_refused() -> None:
    distributed.run(2, refusals, timeout=120)


def test_a_schedule_that_cannot_run_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("osdp.api.resolve_stage_device", lambda *_: pytest.fail("devices are measured first"))
    with pytest.raises(ValueError, match="'1F1B' is unknown"):
        make_plan(net(), batch(2), pp=2, dp=1, schedule="1F1B")


def test_schedules_that_split_the_backward_need_stages_that_reduce_nothing() -> None:
    with pytest.raises(ValueError, match=r"dp=1 \(here 2\)"):
        usable_schedules("zb-h1", ParallelDims(2, 2, 1), Training())
    with pytest.raises(ValueError, match="param_dtype"):
        usable_schedules("zb-v", ParallelDims(2, 1, 1), Training(param_dtype="bfloat16"))
    assert "zb-h1" in usable_schedules(None, ParallelDims(2, 1, 1), Training())
    assert "zb-h1" not in usable_schedules(None, ParallelDims(2, 2, 1), Training())


def test_degrees_follow_from_each_other() -> None:
    assert degrees(8, dp=2) == ParallelDims(4, 2, 1)
    assert degrees(8, pp=2, tp=2) == ParallelDims(2, 2, 2)
    with pytest.raises(ValueError, match="pp=3 does not divide the 8 ranks"):
        degrees(8, pp=3)


# -- checkpoints ------------------------------------------------------------------------------------------

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pp": 2, "dp": 2, "schedule": "1f1b", "strategy": "FULL_SHARD"},
    {"pp": 4, "schedule": "gpipe"},
    {"dp": 4, "strategy": "FULL_SHARD"},
)


def continued(folder: str) -> None:
    reference = net()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    wanted = [trained(reference, theirs, {}) for _ in range(4)]
    for index, layout in enumerate(LAYOUTS):
        model = wrapped(net(), **layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for want in wanted[:2]:
            assert abs(trained(model, optimizer, layout) - want) < 1e-5
        checkpoint.save(f"{folder}/{index}", model, optimizer)
        state = checkpoint.whole_state_dict(model)
        if dist.get_rank() == 0:
            net(seed=3).load_state_dict(state)
        check_plain_states(layout, dict(reference.state_dict()))
    for index in range(len(LAYOUTS)):
        into = LAYOUTS[(index + 1) % len(LAYOUTS)]
        model = wrapped(net(seed=index + 5), **into)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        checkpoint.load(f"{folder}/{index}", model, optimizer)
        plain = net(seed=9)
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        checkpoint.load(f"{folder}/{index}", plain, plain_optimizer)
        for want in wanted[2:]:
            assert abs(trained(model, optimizer, into) - want) < 1e-5, (index, into)
            assert abs(trained(plain, plain_optimizer, {}) - want) < 1e-5, (index, "plain")


def check_plain_states(layout: dict[str, Any], want: dict[str, torch.Tensor]) -> None:
    """A state dict of the whole model loads into stages, from all ranks and from the first."""
    mine = dist.get_rank() == 0

    def check(model: nn.Module, plain: nn.Module) -> None:
        own = plain.state_dict()
        found = model.state_dict()
        assert found.keys() <= own.keys()
        assert all(torch.equal(whole(value), own[name]) for name, value in found.items()), layout

    model, plain = wrapped(net(seed=21), **layout), net(seed=21)
    assert model.load_state_dict(want) == plain.load_state_dict(want)
    check(model, plain)
    # Tied ends have the value of the name that comes last; one is enough where names may be missing.
    ends = [
        name for name, value in plain.named_parameters(remove_duplicate=False) if value is plain.head.weight
    ]
    assert len(ends) == 2
    part = {name: value + 1 for name, value in want.items() if name != ends[1]} | {
        "nowhere.weight": want[ends[0]]
    }
    got, wanted = (one.load_state_dict(part, strict=False) for one in (model, plain))
    assert sorted(got.missing_keys) == sorted(wanted.missing_keys) == [ends[1]]
    assert got.unexpected_keys == wanted.unexpected_keys == ["nowhere.weight"]
    check(model, plain)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*head\.weight.*Unexpected key.*nowhere\.weight"):
        model.load_state_dict(part)
    other = {name: value + 2 for name, value in want.items()} | {ends[1]: want[ends[0]] + 5}
    plain.load_state_dict(other)
    model.load_state_dict(other)
    check(model, plain)
    plain.load_state_dict(part, strict=False)
    result = checkpoint.load_whole_state_dict(model, part if mine else None, strict=False)
    assert result == ([ends[1]], ["nowhere.weight"])
    check(model, plain)
    plain.load_state_dict(other)
    checkpoint.load_whole_state_dict(model, other if mine else None)
    check(model, plain)
    wrong = {**want, ends[0]: torch.zeros(2, 3)}
    for load in (model.load_state_dict, lambda state: checkpoint.load_whole_state_dict(model, state)):
        with pytest.raises(RuntimeError, match=rf"size mismatch for {ends[0]}: "):
            load(wrong)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, layout: dict[str, Any]) -> float:
    if isinstance(model, OSDP):
        dp = layout.get("dp", 1)
        where = dist.get_rank() % dp
        mine = slice(where * 12 // dp, (where + 1) * 12 // dp)
        inputs = {name: value[mine] for name, value in batch(12).items()}
        loss = float(model.train_step(inputs, targets(12)[mine], loss_fn, num_microbatches=3))
    else:
        loss = single_step(model, 12, 5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_checkpoints_move_between_stages_shards_and_the_plain_model(tmp_path: Any) -> None:
    distributed.run(4, continued, str(tmp_path), timeout=180)


def meta_buffers() -> None:
    from transformers import AutoModelForCausalLM, Gemma2Config, GPTNeoConfig

    small = {"vocab_size": 64, "hidden_size": 32, "max_position_embeddings": 16}
    gemma = Gemma2Config(
        **small, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=64,
    )  # fmt: skip
    neo = GPTNeoConfig(
        **small, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=8
    )
    for config in (gemma, neo):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        tokens = (torch.arange(4 * 8).reshape(4, 8) * 7) % 64
        inputs = {"input_ids": tokens, "labels": tokens}
        training = Training(local_batch=2, microbatches=2)
        sample = {name: value[:2] for name, value in inputs.items()}
        model_desc = on_first_rank(partial(ModelDesc.from_module, model, sample))
        profile = estimate(model_desc, devices(1), training)
        staged = OSDP(model, model_desc, devices(1), training=training, profile=profile, pp=2)
        # Each rank holds some of the values that were drawn: a whole model gets them all.
        alone = AutoModelForCausalLM.from_config(config)
        held: list[Any] = [None] * 2
        mine = {name: whole(value.detach()) for name, value in staged.named_parameters()}
        dist.all_gather_object(held, mine)
        alone.load_state_dict(held[0] | held[1], strict=False)
        assert float(staged.train_step(inputs)) == pytest.approx(
            float(alone(**inputs).loss.detach()), rel=1e-5
        )


def test_buffers_of_meta_models_are_where_the_inputs_of_a_stage_are() -> None:
    """Gemma2 scales by a buffer, GPT-Neo masks by one: code around a stage met them on two devices."""
    distributed.run(2, meta_buffers, timeout=120)


def as_of_transformers(seed: int) -> TiedNet:
    """With the names that transformers leaves out of a folder."""
    made = net(seed)
    vars(made)["all_tied_weights_keys"] = {"head.weight": "embed.weight"}
    return made


def read_by_stages(folder: str) -> None:
    want = net().state_dict()
    for index, layout in enumerate(LAYOUTS):
        checkpoint.save_pretrained(wrapped(as_of_transformers(0), **layout), f"{folder}/{index}")
        model = wrapped(as_of_transformers(7), **LAYOUTS[(index + 1) % len(LAYOUTS)])
        checkpoint.load_pretrained(model, f"{folder}/{index}")
        found = model.state_dict()
        assert all(torch.equal(whole(value), want[name]) for name, value in found.items()), (index, layout)


def test_pretrained_weights_reach_all_copies_of_a_tied_one(tmp_path: Any) -> None:
    # The head, in another stage than the embedding, kept its random values without a word.
    distributed.run(4, read_by_stages, str(tmp_path), timeout=180)


def adapters_in_stages(folder: str) -> None:
    made = net()
    vars(made)["peft_config"] = {}
    model = wrapped(made, pp=2, schedule="gpipe")
    with pytest.raises(ValueError, match="adapters of a model in 2 stages are not written: rank 0"):
        checkpoint.save_pretrained(model, folder)


def test_adapters_of_stages_are_not_written_in_part(tmp_path: Any) -> None:
    # The folder had those of the first stage, without a word.
    distributed.run(2, adapters_in_stages, str(tmp_path / "adapters"))
