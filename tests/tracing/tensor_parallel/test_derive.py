"""Tensor-parallel plans: derived for every architecture alike, and refused where they would be wrong."""

from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from osdp import LMHeadLoss, codec
from osdp.api import make_tensor_plan
from osdp.nn.modules import kind_of
from osdp.plan.tensor_parallel import ShardedModule, Style, TensorParallelPlan

pytest.importorskip("transformers")

from tests.helpers.transformer_models import ARCHITECTURES, batch_of, build

VERSION = tuple(map(int, version("transformers").split(".")[:2]))

#: What stays whole, and which attributes are divided, by architecture.
KEPT = {
    "gpt2": {"transformer.wpe"},
    "gpt_neo": {"transformer.wpe"},
    "bert": {
        "bert.embeddings.token_type_embeddings",
        "bert.embeddings.position_embeddings",
        "cls.predictions.transform.dense",
    },
    "vit": {"classifier"},
}
DIVIDED = {
    "gpt2": {"split_size"},
    "gpt_neo": {"num_heads"},
    # Since transformers 5.24 its shapes follow from what it is given.
    "gptj": {"num_attention_heads"} if VERSION < (5, 24) else set(),
    "opt": {"num_heads"},
    "t5": {"n_heads"},
}


def plan_of(model: nn.Module, batch: Any, degree: int = 2) -> TensorParallelPlan:
    return make_tensor_plan(model, batch, degree)


def styles(plan: TensorParallelPlan) -> dict[str, Style]:
    return {entry.module: entry.style for entry in plan.modules}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_sharded_but_for_what_cannot_be(name: str) -> None:
    model = build(name)
    plan = plan_of(model, batch_of(name))
    assert {kept.module for kept in plan.kept} == KEPT.get(name, set())
    assert {divided.name for divided in plan.divided} == DIVIDED.get(name, set())
    found = styles(plan)
    linears = [fqn for fqn, module in model.named_modules() if kind_of(module) in ("linear", "conv1d")]
    assert set(linears) <= set(found) | KEPT.get(name, set())
    assert codec.from_json(TensorParallelPlan, codec.to_json(plan)) == plan
    heads = {fqn for fqn, style in found.items() if style is Style.VOCAB_HEAD}
    assert len(heads) == (name != "vit")


def test_the_model_is_not_touched_and_may_be_on_meta() -> None:
    with torch.device("meta"):
        model = build("gpt2")
    before = {name: id(p) for name, p in model.named_parameters()}
    on_meta = plan_of(model, batch_of("gpt2"))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert on_meta == plan_of(build("gpt2"), batch_of("gpt2"))


def test_blocks_of_a_fused_matrix_are_found() -> None:
    plan = plan_of(build("gpt2"), batch_of("gpt2"))
    blocks = {entry.module: entry.blocks for entry in plan.modules if entry.blocks > 1}
    assert blocks == {"transformer.h.0.attn.c_attn": 3, "transformer.h.1.attn.c_attn": 3}


def test_position_bias_is_sharded_with_the_heads_of_all_layers() -> None:
    plan = plan_of(build("t5"), batch_of("t5"), 4)
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    entries = {entry.module: entry for entry in plan.modules}
    assert (entries[bias].style, entries[bias].dim) == (Style.COLUMN, 1)
    assert entries[bias].region == entries["encoder.block.1.layer.0.SelfAttention.o"].region


def test_heads_that_the_degree_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"c_attn has 25 heads, which 2 tensor-parallel ranks"):
        plan_of(build("gpt2", heads=25), batch_of("gpt2"))
    with pytest.raises(ValueError, match=r"k_proj has 2 heads, which 4 tensor-parallel ranks"):
        plan_of(build("qwen2"), batch_of("qwen2"), 4)


def test_norms_of_each_head_are_summed() -> None:
    plan = plan_of(build("qwen3"), batch_of("qwen3"))
    assert set(plan.summed) == {f"model.layers.{i}.self_attn.{n}_norm" for i in (0, 1) for n in "qk"}


class Gated(nn.Module):
    """Scales the features between its layers by one number that depends on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x) * (1 + self.gate.float()).exp())


def test_a_parameter_that_enters_a_region_unseen_is_refused() -> None:
    with pytest.raises(ValueError, match="parameter gate is used with its features"):
        plan_of(Gated(), torch.zeros(2, 8))


class Classifier(nn.Module):
    """As many classes as kinds of tokens; a vocabulary without a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(64, 8), nn.Embedding(2, 8)
        self.classes = nn.Linear(8, 2)

    def forward(self, words: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return self.classes(self.words(words) + self.kinds(kinds))


def test_classes_are_no_vocabulary() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    assert styles(plan_of(Classifier(), (ids, ids), 4)) == {"words": Style.VOCAB_EMBEDDING}


class Mlp(nn.Module):
    """A residual MLP; what works on the features between its layers is given."""

    def __init__(self, inside: nn.Module, width: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.inside = inside
        self.down = nn.Linear(width, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(self.inside(self.up(x))))


def test_plain_modules() -> None:
    plan = plan_of(Mlp(nn.GELU()), torch.zeros(2, 8))
    assert styles(plan) == {"up": Style.COLUMN, "down": Style.ROW}
    chain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    assert styles(plan_of(chain, torch.zeros(2, 8))) == {"0": Style.COLUMN, "2": Style.ROW}
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert styles(plan_of(layer, torch.zeros(2, 5, 16))) == {"linear1": Style.COLUMN, "linear2": Style.ROW}


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        (nn.Softmax(-1), "differs from the output of the whole module"),
        (nn.Unflatten(-1, (4, 3)), "nothing of"),
        (nn.LayerNorm(12), "nothing of"),
    ],
)
def test_what_would_be_wrong_is_refused(inside: nn.Module, reason: str) -> None:
    if isinstance(inside, nn.Unflatten):
        inside = nn.Sequential(inside, nn.Softmax(-1), nn.Flatten(-2), nn.Flatten(0, 0), _Reversed())
    with pytest.raises(ValueError, match=reason):
        plan_of(Mlp(inside), torch.zeros(2, 8))


class _Reversed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)


def test_features_that_the_degree_does_not_divide_stay_whole() -> None:
    with pytest.raises(ValueError, match="13 features are not divisible by 2 ranks"):
        plan_of(Mlp(nn.GELU(), width=13), torch.zeros(2, 8))


def test_a_plan_checks_its_sizes() -> None:
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        TensorParallelPlan("Net", 1, ())
    with pytest.raises(ValueError, match="10 features in 1 blocks are not divisible by 4 ranks"):
        TensorParallelPlan("Net", 4, (ShardedModule("up", Style.COLUMN, 0, 10),))
    with pytest.raises(ValueError, match="5 rows leave some of the 4 ranks"):
        TensorParallelPlan("Net", 4, (ShardedModule("embed", Style.VOCAB_EMBEDDING, 0, 5),))


def test_the_part_of_a_stage() -> None:
    model = build("gpt2")
    plan = plan_of(model, batch_of("gpt2"))
    del model.transformer.h[0]
    part = plan.restricted([name for name, _ in model.transformer.h.named_modules(prefix="transformer.h")])
    assert {entry.module for entry in part.modules} == {
        f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert [divided.module for divided in part.divided] == ["transformer.h.0.attn"]


class TiedByHand(nn.Module):
    """A language model whose logits, or whose loss, use the embedding's weight outside the embedding."""

    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = head
        if head is not None:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        return x @ self.embed.weight.t() if self.head is None else self.head(x, ids)


@pytest.mark.parametrize("head", [None, LMHeadLoss(nn.Linear(8, 64, bias=False), num_slices=2)])
def test_weights_that_are_used_outside_their_modules_stay_whole(head: nn.Module | None) -> None:
    """Each rank multiplied by its own half of the embedding."""
    plan = plan_of(TiedByHand(head), torch.zeros(2, 5, dtype=torch.long))
    assert styles(plan) == {"up": Style.COLUMN, "down": Style.ROW}
    assert {kept.module: kept.reason for kept in plan.kept} == {
        "embed": "its weight is used outside it as well"
    }


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("computed", [parametrizations.weight_norm, nn.utils.weight_norm])
def test_weights_that_are_computed_stay_whole(computed: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))
    computed(net[0])
    assert styles(plan_of(net, torch.zeros(2, 8))) == {"2": Style.COLUMN, "3": Style.ROW}


class Residual(nn.Module):
    """A residual MLP that is one block of several."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.up, self.inside, self.down = nn.Linear(8, 12), inside, nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inside(self.up(x)))


class Scale(nn.Module):
    """A trained number."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.ParameterList([nn.Parameter(torch.ones(()))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by[0]


@pytest.mark.parametrize("other", [nn.Softmax(-1), Scale()])
def test_blocks_that_differ_inside_are_proven_each(other: nn.Module) -> None:
    """The second had the names and shapes of the first, and was sharded as that one."""
    net = nn.Sequential(Residual(nn.GELU()), Residual(other), nn.Linear(8, 3))
    assert styles(plan_of(net, torch.zeros(2, 8))) == {"0.up": Style.COLUMN, "0.down": Style.ROW}


class Dropping(nn.Module):
    """Multiplies features of its input by features of its input after dropout."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first
        self.up, self.side, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop, self.inner = nn.Dropout(0.1), nn.Dropout(0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = self.drop(x) if self.first else None
        hidden = self.up(x)
        side = self.side(self.drop(x) if dropped is None else dropped)
        return self.head(x + self.down(self.inner(hidden * side)))


def test_dropout_of_what_is_whole_does_not_lie_in_a_region() -> None:
    """Each rank drew a mask of its own, and summed gradients were multiplied by that."""
    found = styles(plan_of(Dropping(first=True), torch.zeros(2, 8)))
    assert found == {"up": Style.COLUMN, "side": Style.COLUMN, "down": Style.ROW}
    with pytest.raises(ValueError, match="random numbers, such as dropout, are drawn inside"):
        plan_of(Dropping(first=False), torch.zeros(2, 8))


class Counting(nn.Module):
    """Counts its forwards, and projects by a fixed matrix in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("basis", torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x @ self.basis


@pytest.mark.parametrize("last", [Counting(), nn.BatchNorm1d(8)])
def test_buffers_in_float32_are_no_obstacle_and_stay_as_they_are(last: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), last, nn.Linear(8, 3))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    assert styles(plan_of(net, torch.zeros(4, 8))) == {"0": Style.COLUMN, "2": Style.ROW}
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())


class Adapted(nn.Module):
    """A linear module with a low-rank update."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def test_adapters_are_sharded_with_what_they_adapt() -> None:
    """They came first, being smallest, and all else stayed whole."""
    net = Mlp(nn.GELU())
    net.up, net.down = Adapted(net.up), Adapted(net.down)
    found = styles(plan_of(net, torch.zeros(2, 8)))
    assert found == {
        "up.base": Style.COLUMN, "up.b": Style.COLUMN, "down.base": Style.ROW, "down.a": Style.ROW
    }  # fmt: skip


class Normed(nn.Module):
    """A batch norm over channels of (batch, sequence, channels), or stochastic depth."""

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm is None:
            return x * (torch.rand(x.shape[0], 1, 1) < 0.9) if self.training else x
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class NormedResidual(Residual):
    """A residual MLP of what a given module makes of its input."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(nn.GELU())
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inside(self.up(self.norm(x))))


class Sequences(nn.Module):
    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([NormedResidual(Normed(norm))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.embed(x))


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.BatchNorm1d(8), "takes statistics over all tokens"),
        (None, "draws random numbers for whole samples"),
    ],
)
def test_what_ranks_do_to_a_part_of_the_sequence_in_training_only_is_refused(
    norm: nn.Module | None, reason: str
) -> None:
    """The proof runs in evaluation mode, where batch norms see each position by itself."""
    with pytest.raises(ValueError, match=reason):
        make_tensor_plan(Sequences(norm), torch.zeros(2, 6, 4), 2, sequence_parallel=True)
