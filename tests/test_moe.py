"""Mixtures of experts of transformers 5, whose experts are grouped matrix products; models that read values.

torch's fake kernel of that product takes bfloat16 only, so that a model in float32 could not be described.
"""

import re
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from osdp import OSDP
from osdp.nn.fake_tensors import FakeTensors
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.tracing.ops import Operation
from osdp.tracing.trace import describe
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand
from tests.helpers.random_plans import searched_plan
from tests.helpers.training import differences

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def mixtral(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, **options))


def qwen3_moe(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **experts, **options))


KINDS = {"Mixtral": mixtral, "Qwen3-MoE": qwen3_moe}


def batch_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """On the second rank one token only, so that most experts get none there."""
    drawn = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
    ids = drawn if rank == 0 else torch.full_like(drawn, 5 + step)
    return {"input_ids": ids, "labels": ids}


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(**batch_of(step, rank)).loss


class _Products(TorchDispatchMode):
    """Keeps the grouped products that run: layouts of operands and result, and FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if "grouped_mm" in str(func):
            operation = Operation.of(func, args, kwargs or {}, output)
            layouts = [(t.shape, t.stride(), t.dtype) for t in (*operation.inputs, *operation.outputs)]
            self.found.append((operation.flops, *layouts))
        return output


def _grouped_products(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Those of a forward and backward of 5 rows in 3 groups, from 8 to 7 features."""
    rows = torch.ones(5, 8, dtype=dtype, requires_grad=True)
    weight = torch.ones(3, 7, 8, dtype=dtype, requires_grad=True)
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    with _Products() as products:
        out = nn.functional.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)
        out.backward(torch.empty_strided(out.shape, out.stride(), dtype=dtype).fill_(1.0))
    return products.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_grouped_products_are_laid_out_as_real_ones(dtype: torch.dtype) -> None:
    real = _grouped_products(dtype)
    with FakeTensors():
        assert _grouped_products(dtype) == real
    assert [flops for flops, *_ in real] == [2 * 5 * 8 * 7] * 3


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((torch.float64,) * 2, "not torch.float64 and torch.float64"),
        ((torch.float32, torch.bfloat16), "bfloat16$"),
    ],
)
def test_fake_grouped_products_refuse_what_real_ones_do(
    dtypes: tuple[torch.dtype, torch.dtype], message: str
) -> None:
    offsets = torch.tensor([2, 5], dtype=torch.int32)

    def multiply() -> None:
        torch._grouped_mm(torch.ones(5, 8, dtype=dtypes[0]), torch.ones(2, 8, 8, dtype=dtypes[1]), offsets)

    with pytest.raises(RuntimeError):
        multiply()
    with pytest.raises(RuntimeError, match=message), FakeTensors():
        multiply()


@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_of_experts_are_described(kind: str) -> None:
    model = KINDS[kind]()
    desc = describe(model, batch_of(0, 0))
    experts = [op for op in desc.operators if op.name.endswith("mlp.experts")]
    assert len(experts) == 2 and all(op.executed for op in experts)
    flops = sum(
        segment.forward.flops(2)
        for segment in desc.segments
        if segment.module.endswith("layers.0.mlp.experts")
    )
    # 16 tokens, each to 2 experts: gate, up and down projections.
    inner = model.config.intermediate_size if kind == "Mixtral" else model.config.moe_intermediate_size
    assert flops == 2 * 16 * 2 * 3 * 32 * inner


def _train_under(kind: str, plan: Plan | None) -> list[str]:
    if plan is None:
        model = KINDS[kind]()
        limit = int(3.6 * sum(parameter.nbytes for parameter in model.parameters()))
        plan = OSDP(model, batch_of(0, dist.get_rank()), limit).plan
    return differences(KINDS[kind], loss_of, plan, tolerance=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_search_trains_mixtures_of_experts(kind: str) -> None:
    """Experts that a rank does not choose are zero rows of one gradient there."""
    plan = searched_plan(describe(KINDS[kind](), batch_of(0, 0)), 2, limit=3.6)
    assert any(decision.mode.sharded for decision in plan.decisions)
    assert run(2, _train_under, kind, plan) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_of_experts_are_measured(kind: str) -> None:
    assert run(2, _train_under, kind, None, timeout=170.0) == [[], []]


def _train_in_modes() -> list[str]:
    found = []
    for kind, mode in product(KINDS, (Mode.NO_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD)):

        def build(kind: str = kind) -> nn.Module:
            # Grouped products know no float64.
            return KINDS[kind](experts_implementation="batched_mm").double()

        found += [f"{kind}, {mode}: {d}" for d in differences(build, loss_of, plan_by_hand(build(), mode, 2))]
    return found


def test_mixtures_of_experts_train_as_a_single_process_does() -> None:
    assert run(2, _train_in_modes) == [[], []]


class Reader(nn.Linear):
    """A model that reads values in some way."""

    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.way == "item":
            return x * x.max().item()  # reads by item
        if self.way == "branch" and x.sum() > 0:  # reads by branch
            return -x
        if self.way == "indices":
            return x[x > 0]  # reads by indices
        if self.way == "numpy":
            return x * float(x.detach().numpy().sum())  # reads by numpy
        return x


def _line(words: str) -> int:
    with open(__file__, encoding="utf8") as source:
        return next(number for number, line in enumerate(source, 1) if line.rstrip().endswith(words))


@pytest.mark.parametrize("way", ["item", "branch", "indices", "numpy"])
def test_a_module_that_reads_values_is_named_with_the_users_line(way: str) -> None:
    desc = describe(nn.Sequential(Reader(way)), torch.zeros(2, 4))
    (doubt,) = desc.doubts
    assert f"{__file__}:{_line(f'# reads by {way}')}, in forward" in doubt
    assert [operator.cut for operator in desc.operators] == [None]


def test_experts_chosen_one_by_one_are_described_as_one() -> None:
    desc = describe(mixtral(experts_implementation="eager"), batch_of(0, 0))
    assert [module.name for module in desc.opaque] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert all(re.search(r"modeling_mixtral.py:\d+, in forward", doubt) for doubt in desc.doubts)
