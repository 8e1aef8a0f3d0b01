"""FSDP's arguments have the effect they had, or one line says why they need none or cannot have it."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fairscale.nn.wrap import enable_wrap, wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from osdp import OSDP, ModelDesc
from osdp.integrations import fsdp_arguments
from osdp.integrations.fsdp_arguments import FSDPArguments, translate, without_contradictions
from osdp.plan.sharding import Mode
from osdp.runtime.computation import Computation
from tests.habits.running.plans import device_of
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("given", "options", "computation"),
    [
        ({"mixed_precision": MixedPrecision(BF16, F32)}, {"param_dtype": BF16, "reduce_dtype": F32}, {}),
        (
            {"mp_policy": MixedPrecisionPolicy(BF16, output_dtype=F32, cast_forward_inputs=False)},
            {"param_dtype": BF16},
            {"output_dtype": F32, "cast_forward_inputs": False},
        ),
        ({"mixed_precision": True, "compute_dtype": BF16}, {"param_dtype": BF16}, {}),
        ({"mixed_precision": None, "mp_policy": None}, {}, {}),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"strategy": Mode.SHARD_GRAD_OP}, {}),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"strategy": Mode.HYBRID_SHARD}, {}),
        ({"reshard_after_forward": False}, {"strategy": Mode.SHARD_GRAD_OP}, {}),
        ({"cpu_offload": CPUOffload(True)}, {"offload": True}, {}),
        ({"offload_policy": CPUOffloadPolicy()}, {"offload": True}, {}),
        ({"offload_policy": OffloadPolicy()}, {"offload": False}, {}),
        ({"ignored_modules": [], "ignored_params": None, "use_orig_params": True}, {}, {}),
    ],
)
def test_arguments_mean_what_they_meant(
    given: dict[str, Any], options: dict[str, Any], computation: dict[str, Any]
) -> None:
    assert translate(given) == (options, Computation(**computation))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"ignored_modules": [nn.Linear(1, 1)]},
            "ignored_modules: every parameter has its place in the plan",
        ),
        ({"reshard_after_forward": 4}, r"reshard_after_forward=4: .* pass group_sizes=\(4,\)"),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, "there are FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"),
        (
            {"sharding_strategy": "NO_SHARD", "reshard_after_forward": True},
            "reshard_after_forward asks for strategy=FULL_SHARD, and another argument for NO_SHARD",
        ),
        ({"mixed_precision": MixedPrecision(BF16, buffer_dtype=BF16)}, "buffers keep their dtype"),
        (
            {"mixed_precision": MixedPrecision(BF16, keep_low_precision_grads=True)},
            "keep_low_precision_grads",
        ),
        (
            {"mixed_precision": MixedPrecision(BF16, _module_classes_to_ignore=(nn.LayerNorm,))},
            "names LayerNorm: batch norms alone keep their dtype",
        ),
        ({"shard_placement_fn": lambda p: None}, "shard_placement_fn: parameters are sharded on dim 0"),
        ({"process_group": (None, None)}, "process_group: pass mesh=, with two axes"),
        (
            {"process_group": (None, None), "dp_mesh_dims": object()},
            "dp_mesh_dims: pass mesh= with the .* alone, .*; process_group: pass mesh=",
        ),
        (
            {"mixed_precision": MixedPrecision(cast_forward_inputs=True, cast_root_forward_inputs=False)},
            "inputs are cast for all modules or for none; leave out cast_forward_inputs",
        ),
        (
            {
                "mixed_precision": MixedPrecision(BF16, cast_root_forward_inputs=False),
                "mp_policy": MixedPrecisionPolicy(BF16),
            },
            "mp_policy casts inputs or outputs otherwise than mixed_precision: pass one",
        ),
    ],
)
def test_what_cannot_be_says_why(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        translate(given)


def test_own_options_and_arguments_of_fsdp_may_agree_only() -> None:
    # Those of FSDP were dropped, without a word.
    translated = {"strategy": Mode.FULL_SHARD, "param_dtype": BF16, "offload": True}
    agreed = {"strategy": "FULL_SHARD", "param_dtype": "bfloat16", "offload": None, "slices": ()}
    found = without_contradictions(translated, agreed)
    assert found == {"strategy": "FULL_SHARD", "param_dtype": "bfloat16", "offload": True, "slices": ()}
    with pytest.raises(ValueError, match=r"offload=False, .* for True: .*; strategy=NO_SHARD, and"):
        without_contradictions(translated, {"strategy": "NO_SHARD", "offload": False})
    with enable_wrap(wrapper_cls=OSDP, mp_policy=MixedPrecisionPolicy(output_dtype=F32)):
        with pytest.raises(ValueError, match="hold for the whole model: pass them to the root's call"):
            wrap(nn.Linear(1, 1))


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"ignored_params: .*; reshard_after_forward=3: "):
        translate({"ignored_params": {nn.Parameter(torch.ones(1))}, "reshard_after_forward": 3})


def test_what_is_not_needed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=fsdp_arguments.__name__):
        translate({"limit_all_gathers": True, "sync_module_states": True, "sharding_strategy": "FULL_SHARD"})
    assert len(caplog.messages) == 3
    assert "limit_all_gathers: what is gathered at a time is part of the plan's peak" in caplog.messages
    assert "FULL_SHARD is forced on every operator; leave the argument out" in caplog.text


def test_every_argument_is_documented() -> None:
    for name in fsdp_arguments.names():
        assert f"    {name}: " in (FSDPArguments.__doc__ or "")


# -- in a running model -------------------------------------------------------------------------------------


class Norms(nn.Module):
    """Convolutions with batch norms, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)).relu().mean((2, 3)))


class Seen:
    """Dtypes of what a module is given and returns."""

    def __init__(self, module: nn.Module) -> None:
        self.inputs: list[torch.dtype] = []
        self.outputs: list[torch.dtype] = []
        module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.inputs.append(args[0].dtype)
        self.outputs.append(output.dtype)


@pytest.mark.parametrize("mode", ["NO_SHARD", "FULL_SHARD", "SHARD_OPTIMIZER", None])
def test_batch_norms_keep_their_dtype(mode: str | None) -> None:
    # F.batch_norm refused weights in bfloat16 beside statistics in float32, deep inside a profile.
    run(2, _batch_norms, mode)


def _batch_norms(mode: str | None) -> None:
    torch.manual_seed(0)
    model, x = Norms(), torch.randn(4, 3, 6, 6)
    seen = Seen(model.norm)
    strategy = {} if mode is None else {"strategy": mode}
    precision = MixedPrecision(BF16, F32)
    wrapped = OSDP(model, x, device_of(2), cache_dir=None, mixed_precision=precision, **strategy)  # type: ignore[misc]
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    assert wrapped.plan.training.param_dtype == "bfloat16"
    assert wrapped.plan.modes["norm"] == Mode.NO_SHARD
    for _ in range(2):
        out = wrapped(x)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert out.dtype == BF16 and set(seen.inputs) == {BF16}
    weight = wrapped.module.norm.weight
    assert weight.dtype == F32 and model.norm.running_mean.dtype == F32
    whole = [torch.empty_like(getattr(weight, "full_tensor", lambda: weight)()) for _ in range(2)]
    dist.all_gather(whole, getattr(weight, "full_tensor", lambda: weight)().detach())
    assert torch.equal(whole[0], whole[1])


def _inside_a_unit() -> None:
    """A plan by hand that has a batch norm in a sharded unit: it is replicated there all the same."""
    torch.manual_seed(0)
    model, x = Norms(), torch.randn(4, 3, 6, 6)
    joined = {"first": "both", "norm": "both"}
    plan = plan_by_hand(
        model, Mode.FULL_SHARD, 2, groups=joined, param_dtype="bfloat16", reduce_dtype="float32"
    )
    wrapped = OSDP(model, plan=plan)
    wrapped(x + dist.get_rank()).float().sum().backward()
    assert model.norm.weight.grad is not None and model.norm.weight.grad.dtype == F32
    grads = [torch.empty(8) for _ in range(2)]
    grad = model.norm.weight.grad
    dist.all_gather(grads, getattr(grad, "full_tensor", lambda: grad)())
    assert torch.equal(grads[0], grads[1])


def test_a_batch_norm_in_a_sharded_unit_is_reduced() -> None:
    run(2, _inside_a_unit)


def _policies() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
        inner = Seen(model[0])
        plan = plan_by_hand(model, mode, 2, param_dtype="bfloat16")
        policy = MixedPrecisionPolicy(output_dtype=F32)
        wrapped = OSDP(model, plan=plan, mp_policy=policy)
        assert wrapped(x).dtype == F32 and inner.outputs == [BF16]
        assert len(wrapped) == 2 and list(wrapped) == list(model) and wrapped and wrapped[1] is model[1]

        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
        plan = plan_by_hand(model, mode, 2, param_dtype="bfloat16")
        wrapped = OSDP(model, plan=plan, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        with pytest.raises(RuntimeError, match=r"dtype|same|mat1 and mat2"):
            wrapped(x)
        assert wrapped(x.bfloat16()).dtype == BF16


def test_outputs_are_cast_and_inputs_left_as_asked() -> None:
    run(2, _policies)


def _on_meta() -> None:
    def ones(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    class Own(nn.Module):
        """Cannot initialise itself."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        with torch.device("meta"):
            model = nn.Sequential(Own(), nn.Linear(4, 2))
        wrapped = OSDP(model, plan=plan_by_hand(model, mode, 2), param_init_fn=ones)
        assert torch.equal(wrapped(torch.ones(1, 4)), torch.full((1, 2), 17.0))


def test_a_function_initialises_what_is_on_meta() -> None:
    run(2, _on_meta)


def _hybrid() -> None:
    x = torch.randn(2, 16)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    from benchmarks.support.candidates import gloo_devices
    from osdp.hardware.device_info import DeviceInfo

    device: DeviceInfo = gloo_devices(2, 2)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    desc = ModelDesc.from_module(model, x)
    strategy = ShardingStrategy.HYBRID_SHARD
    wrapped = OSDP(model, desc, device, mesh=mesh, sharding_strategy=strategy, cache_dir=None)
    assert wrapped.mesh.size() == 4 and Mode.HYBRID_SHARD in wrapped.plan.modes.values()
    assert {unit.group_size for unit in wrapped.plan.units if unit.mode is Mode.HYBRID_SHARD} == {2}
    wrapped(x).sum().backward()
    plain = nn.Linear(16, 2)
    weight, plan = plain.weight, plan_by_hand(plain, Mode.NO_SHARD, 4)
    # It was told on the rank alone whose device it is not, once the model was wrapped.
    device_id = torch.device("meta" if dist.get_rank() == 1 else "cpu")
    with pytest.raises(ValueError, match=r"rank 1: device_id=meta, and the model is to run on cpu"):
        OSDP(plain, plan=plan, device_id=device_id)
    assert plain.weight is weight and type(weight) is nn.Parameter
    with pytest.raises(ValueError, match="mesh= is another than device_mesh= or process_group="):
        OSDP(plain, plan=plan, mesh=init_device_mesh("cpu", (4,)), device_mesh=mesh)


def test_a_mesh_of_two_axes_is_that_of_hsdp() -> None:
    run(4, _hybrid)


def _marked() -> None:
    with enable_wrap(
        wrapper_cls=OSDP, flatten_parameters=True, mixed_precision=False, reshard_after_forward=True
    ):
        model = nn.Sequential(wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 2)))
    x = torch.randn(2, 4)
    wrapped = OSDP(model, x, device_of(2), cache_dir=None)
    assert set(wrapped.plan.modes.values()) == {Mode.SHARD_GRAD_OP}


def test_fairscales_options_are_taken_inside_enable_wrap() -> None:
    run(2, _marked)


def _summoned() -> None:
    x = torch.ones(1, 4)
    for mode in ("NO_SHARD", "FULL_SHARD", "SHARD_OPTIMIZER"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
        wrapped = OSDP(model, plan=plan_by_hand(model, Mode(mode), 2))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        wrapped(x).sum().backward()
        optimizer.step()
        with wrapped.summon_full_params(writeback=False):
            assert type(model[0].weight) is nn.Parameter and model[0].weight.shape == (5, 4)
            nn.init.zeros_(model[0].weight)
        assert wrapped(x).abs().sum() > 0
        with OSDP.summon_full_params(wrapped):
            for parameter in model.parameters():
                nn.init.ones_(parameter)
        with pytest.raises(ValueError, match=r"whole_state_dict\(model\)"):
            with OSDP.summon_full_params(wrapped, rank0_only=True, offload_to_cpu=True):
                pass
        with pytest.raises(ValueError, match=r"checkpoint\.save"):
            OSDP.set_state_dict_type(wrapped, "FULL_STATE_DICT")
        assert torch.equal(wrapped(x), torch.full((1, 2), 26.0))
        assert [id(p) for p in wrapped.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
        wrapped(x).sum().backward()
        optimizer.step()
        assert not torch.equal(wrapped(x), torch.full((1, 2), 26.0))


def test_whole_parameters_are_there_to_look_at_and_to_change() -> None:
    run(2, _summoned)
