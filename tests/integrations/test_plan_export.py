"""A plan that is written for another library is loaded and trained there, and says what is lost."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from benchmarks.support.trainers.problem import Sentences, plain_model
from osdp import ModelDesc, Plan, Training, make_plan
from osdp.cluster.devices import device_info_of, parse_devices
from osdp.integrations.plan_export import to_accelerate, to_fully_shard, to_transformers
from osdp.plan.sharding import Mode, Route
from tests.habits.running.plans import plan_of
from tests.helpers.distributed import run
from tests.helpers.plans import ROOT, offload, plan_by_hand
from tests.helpers.torchrun import as_under_torchrun


def batch_of_rank() -> dict[str, torch.Tensor]:
    data = Sentences()
    rows = range(dist.get_rank() * 2, dist.get_rank() * 2 + 2) if dist.is_initialized() else range(2)
    return {name: torch.stack([data[row][name] for row in rows]) for name in data[0]}


def mixed(kind: str = "mixed", world_size: int = 2) -> Plan:
    model = plain_model()
    desc = ModelDesc.from_module(model, {n: v[None].repeat(2, 1) for n, v in Sentences()[0].items()})
    return plan_of(kind, desc, Training(local_batch=2), world_size)


def losses_of(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**batch_of_rank()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def whole_losses() -> list[float]:
    """The same steps in one process."""
    model, data = plain_model(), Sentences()
    batch = {name: torch.stack([data[row][name] for row in range(4)]) for name in data[0]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_fully_shard() -> list[float]:
    exported = to_fully_shard(mixed())
    names: dict[str, Any] = {}
    exec(exported.content, names)
    model = names["shard"](plain_model(), init_device_mesh("cpu", (2,)))
    assert isinstance(model.model.layers[0].mlp.gate_proj, FSDPModule)
    return losses_of(model)


def by_transformers(folder: str) -> list[float]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with as_under_torchrun():
        exported = to_transformers(mixed())
        if dist.get_rank() == 0:
            plain_model().save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(**exported.content)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        assert isinstance(model.model.layers[0].mlp.gate_proj, FSDPModule)
        return losses_of(model.train())


def by_accelerate(folder: str) -> list[float]:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plan = mixed("full_shard")
    content = to_accelerate(plan, plain_model()).content
    path = Path(folder, f"config-{dist.get_rank()}.yaml")
    path.write_text(yaml.safe_dump(content), encoding="utf8")
    fsdp = yaml.safe_load(path.read_text(encoding="utf8"))["fsdp_config"]
    classes = fsdp.get("fsdp_transformer_layer_cls_to_wrap")
    with as_under_torchrun():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=fsdp["fsdp_version"],
            reshard_after_forward=fsdp["fsdp_reshard_after_forward"],
            auto_wrap_policy=fsdp["fsdp_auto_wrap_policy"].lower(),
            transformer_cls_names_to_wrap=classes.split(",") if classes else None,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = plain_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for _ in range(3):
            loss = model(**batch_of_rank()).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        return losses


def test_fully_shard_calls_train_what_the_plan_shards() -> None:
    assert run(2, by_fully_shard)[0] == pytest.approx(whole_losses(), rel=1e-5)


def test_transformers_loads_the_plan(tmp_path: Path) -> None:
    assert run(2, by_transformers, str(tmp_path), fresh=True)[0] == pytest.approx(whole_losses(), rel=1e-5)


def test_accelerate_trains_by_the_configuration(tmp_path: Path) -> None:
    assert run(2, by_accelerate, str(tmp_path), fresh=True)[0] == pytest.approx(whole_losses(), rel=1e-5)


def test_what_is_lost_is_told() -> None:
    said = " ".join(to_fully_shard(mixed()).lost)
    assert "replicated operators are sharded and kept gathered after forward" in said
    assert "with sharded optimizer states alone" in said
    assert "# Lost: " in to_fully_shard(mixed()).content
    assert "operators in slices run whole" in " ".join(to_transformers(mixed("sliced")).lost)
    assert "gradient_checkpointing=True recomputes all" in " ".join(to_transformers(mixed("sliced")).lost)
    assert "one choice holds for all" in " ".join(to_accelerate(mixed(), plain_model()).lost)
    assert to_fully_shard(mixed("full_shard")).lost == ()


def test_offloading_and_dtypes_that_are_lost_are_told() -> None:
    plan, model = offload(mixed()), plain_model()
    for exported in (to_transformers(plan), to_accelerate(plan, model)):
        assert re.search(r"\d+ units in host memory stay on the device", " ".join(exported.lost))
    # Of a plan with nothing but the root's unit everything was offloaded.
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    in_root = plan_by_hand(whole, Mode.SHARD_GRAD_OP, 2, groups={"0": ROOT, "1": ROOT})
    assert to_accelerate(in_root, whole).content["fsdp_config"]["fsdp_offload_params"] is False
    apart = plan_by_hand(whole, Mode.FULL_SHARD, 2, param_dtype="bfloat16", reduce_dtype="float32")
    assert "it reduces in the dtype of mixed_precision" in " ".join(to_accelerate(apart, whole).lost)
    alike = plan_by_hand(whole, Mode.FULL_SHARD, 2, param_dtype="bfloat16")
    assert "reductions in bfloat16: it reduces in float32" in " ".join(to_transformers(alike).lost)


def test_accelerate_is_told_of_several_machines() -> None:
    """All processes of a plan for two machines were started on the first."""
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    desc = ModelDesc.from_module(whole, torch.zeros(2, 8))
    devices = device_info_of(parse_devices("2 x 4 x A100, 100 Gbit/s"))
    exported = to_accelerate(make_plan(None, desc, devices), whole)
    assert (exported.content["num_machines"], exported.content["num_processes"]) == (2, 8)
    assert "main_process_ip" in " ".join(exported.lost)


def test_the_routes_that_are_lost_are_those_of_the_units_that_have_some() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plan = plan_by_hand(whole, Mode.FULL_SHARD, 2)
    first, second = plan.units
    routed = plan.with_sharding(units=(first, replace(second, route=Route.EXCHANGE)))
    assert "1 units use the backend's own collectives instead of exchange" in to_fully_shard(routed).lost
