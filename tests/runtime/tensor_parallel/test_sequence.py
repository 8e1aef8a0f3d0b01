"""Ranks that share the sequence train as one process does, alone and beside stages and replicas."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from osdp import OSDP, DeviceInfo, Link, ModelDesc, codec
from osdp.api import make_plan, make_tensor_plan
from osdp.hardware.device_info import COLLECTIVES, PointToPointLink
from osdp.model.training import Training
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.profiler.roofline import estimate
from osdp.runtime.tensor_parallel import parallelize
from tests.helpers.distributed import run

pytest.importorskip("transformers")

from tests.helpers.transformer_models import build

PROVEN = ("gpt2", "gpt_neo", "gptj", "bert", "opt", "llama", "qwen2", "qwen3", "mistral")
NAMES = ("gpt2", "llama", "opt", "bert")
TOLERANCE = 1e-5


def batch_of(samples: int = 2, length: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 257, (samples, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(name: str, model: nn.Module, reference: nn.Module) -> None:
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    for fqn, parameter in model.named_parameters():
        want = wanted[fqn].grad
        assert parameter.grad is not None and want is not None, (name, fqn)
        error = (whole(parameter.grad) - want).norm()
        assert error <= TOLERANCE * max(want.norm().item(), 1e-2), (name, fqn)


def alone(plans: dict[str, TensorParallelPlan]) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for name, plan in plans.items():
        reference = build(name)
        model = parallelize(deepcopy(reference), plan, mesh)
        for net in (reference, model):
            net(**batch_of()).loss.backward()
        check_gradients(name, model, reference)
        seen: list[int] = []
        norm = next(module for module in plan.sequence.summed if plan.sequence)
        model.get_submodule(norm).register_forward_hook(
            lambda m, a, out, seen=seen: seen.append(out.shape[1])
        )
        model(**batch_of())
        assert seen == [4], name
    with pytest.raises(ValueError, match="a sequence of 7 cannot be shared evenly by 2 tensor-parallel"):
        model(**batch_of(length=7))


def test_gradients_on_two_ranks() -> None:
    plans = {name: make_tensor_plan(build(name), batch_of(), 2, sequence_parallel=True) for name in PROVEN}
    for plan in plans.values():
        assert codec.from_json(TensorParallelPlan, codec.to_json(plan)) == plan
    run(2, alone, plans, timeout=120)


def planned(name: str, layout: ParallelDims, *, sequence_parallel: bool = True) -> Plan:
    link = {"latency": 1e-6, "bandwidth": 1e10}
    info = DeviceInfo(
        memory_limit=2**40, devices_per_node=layout.dp, stage_link=PointToPointLink(**link), flops=1e9,
        links=tuple(Link(kind, "world", layout.dp, **link) for kind in COLLECTIVES),
        tensor_links=tuple(Link(kind, "tensor", 2, **link) for kind in COLLECTIVES), memory_bandwidth=1e10,
    )  # fmt: skip
    training = Training(local_batch=2, microbatches=2)
    model = build(name)
    profile = estimate(ModelDesc.from_module(model, batch_of()), info, training)
    return make_plan(
        model, batch_of(), info, pp=layout.pp, dp=layout.dp, tp=layout.tp, training=training,
        profile=profile, sequence_parallel=sequence_parallel, schedule="1f1b",
    )  # fmt: skip


def beside(plans: dict[tuple[str, str], Plan]) -> None:
    for (name, _), plan in plans.items():
        reference = build(name)
        model = OSDP(deepcopy(reference), plan=plan)
        data = dist.get_rank() // plan.tp % plan.dp
        batches = [batch_of(4, seed=rank) for rank in range(plan.dp)]
        loss = model.train_step(batches[data])
        losses = [reference(**batch).loss for batch in batches]
        (sum(losses) / len(losses)).backward()
        torch.testing.assert_close(loss, sum(losses).detach() / len(losses))
        check_gradients(name, model, reference)


def test_gradients_beside_stages_and_replicas() -> None:
    layouts = {"stages": ParallelDims(2, 1, 2), "replicas": ParallelDims(1, 2, 2)}
    plans = {(name, kind): planned(name, layout) for name in NAMES for kind, layout in layouts.items()}
    run(4, beside, plans, timeout=170)


def test_activations_between_regions_take_less_memory() -> None:
    peaks = [
        planned("llama", ParallelDims(1, 1, 2), sequence_parallel=shared).predicted.peak_bytes
        for shared in (True, False)
    ]
    assert peaks[0] < peaks[1]


def test_what_cannot_be_proven_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 7 cannot be shared evenly by 2 tensor-parallel"):
        make_tensor_plan(build("gpt2"), batch_of(length=7), 2, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"T5.*: a region of encoder.block.0 reaches to encoder.block.1"):
        make_tensor_plan(build("t5"), batch_of(), 2, sequence_parallel=True)
    pixels = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(ValueError, match="a sequence of 5 cannot be shared evenly by 2"):
        make_tensor_plan(build("vit"), pixels, 2, sequence_parallel=True)
    with pytest.raises(ValueError, match="pass tp=, too"):
        make_plan(build("gpt2"), batch_of(), 2**30, pp=1, dp=1, sequence_parallel=True)
