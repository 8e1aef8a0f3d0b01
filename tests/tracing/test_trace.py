"""Descriptions of models, from fake tensors."""

import json
import random
import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from osdp import codec
from osdp.model.description import ModelDesc
from osdp.profiler.measure import profile_model
from osdp.report.graph import graph
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.trace import describe
from tests.helpers.distributed import run


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, layers, and a head that is tied to the embedding."""

    def __init__(self, layers: int = 3, width: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.zeros(2, 5, dtype=torch.long)


def test_segments_tile_the_forward_in_order() -> None:
    desc = describe(Net(layers=1, tied=False), IDS)
    rows = [(s.module, s.call, s.part, s.operators) for s in desc.segments]
    assert rows == [
        ("embed", 0, 0, ("embed",)),
        ("layers.0.norm", 0, 0, ("layers.0.norm",)),
        ("layers.0.up", 0, 0, ("layers.0.up",)),
        ("layers.0", 0, 2, ()),
        ("layers.0.down", 0, 0, ("layers.0.down",)),
        ("layers.0", 0, 3, ()),
        ("head", 0, 0, ("head",)),
        ("", 1, 0, ()),
    ]
    assert desc.modules == ("", "embed", "layers.0", "layers.0.norm", "layers.0.up", "layers.0.down", "head")
    assert [s.outputs[0].shape for s in desc.segments] == [
        (2, 5, 8), (2, 5, 8), (2, 5, 16), (2, 5, 16), (2, 5, 8), (2, 5, 8), (2, 5, 16), (),
    ]  # fmt: skip
    assert {s.outputs[0].dtype for s in desc.segments} == {"float32"}


def test_identical_layers_share_signatures() -> None:
    desc = describe(Net(layers=5), IDS)
    per_layer = [[s.signature for s in desc.segments if s.module.startswith(f"layers.{i}")] for i in range(5)]
    assert per_layer[1] == per_layer[2] == per_layer[3]
    assert len(set(per_layer[1])) == len(per_layer[1])
    wider = describe(Net(layers=5, width=16), IDS)
    layers = [{s.signature for s in d.segments if s.module.startswith("layers")} for d in (desc, wider)]
    assert not layers[0] & layers[1]


def test_a_rate_that_differs_from_layer_to_layer_makes_no_other_segment() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4))
    drops = [s.signature for s in describe(model, torch.zeros(2, 4)).segments if s.module in ("1", "3")]
    assert len(drops) == 2 and drops[0] == drops[1]


def test_flops_are_those_of_the_flop_counter() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    x = torch.randn(4, 3, 6, 6)
    desc = describe(model, x)
    with FlopCounterMode(display=False) as forward:
        out = model(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert sum(s.forward.flops(4) for s in desc.segments) == forward.get_total_flops()
    assert sum(s.backward.flops(4) for s in desc.segments) == backward.get_total_flops()


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_backward_of_grouped_convolutions_takes_twice_the_flops_of_forward(
    kind: type[nn.Conv2d | nn.ConvTranspose2d], groups: int
) -> None:
    # torch's formula takes those of a dense convolution for the gradient of the weight: 96 times ConvNeXt's.
    model = nn.Sequential(nn.Conv2d(8, 8, 1), kind(8, 8, 3, padding=1, groups=groups), nn.ReLU())
    desc = describe(model, torch.randn(4, 8, 6, 6))
    (convolution,) = [segment for segment in desc.segments if segment.module == "1"]
    assert convolution.forward.flops(4) == 2 * 4 * 8 * 36 * 9 * 8 // groups
    assert convolution.backward.flops(4) == 2 * convolution.forward.flops(4)


def test_attention_on_the_cpu_has_flops() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q)

    b, h, s, d = 2, 3, 8, 4
    desc = describe(nn.Sequential(nn.Linear(d, d), Attention()), torch.zeros(b, h, s, d))
    (attention,) = [segment for segment in desc.segments if segment.module == "1"]
    assert attention.forward.flops(b) == 2 * 2 * b * h * s * s * d


def test_saved_live_and_moved_bytes_are_those_counted_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    desc = describe(model, torch.zeros(2, 8))
    by_module = {s.module: s for s in desc.segments}
    # Only ReLU's result is saved: the second Linear saves the same storage, the first one the batch.
    assert {name: s.saved_bytes(2) for name, s in by_module.items()} == {"0": 0, "1": 128, "2": 0, "": 0}
    # ReLU's result replaces its input; all go in backward, but for the loss.
    assert by_module["0"].forward.live_bytes(2) == 128
    assert by_module["1"].forward.live_bytes(2) == 0
    assert by_module["1"].forward.peak_bytes(2) == 128
    assert sum(s.forward.live_bytes(2) + s.backward.live_bytes(2) for s in desc.segments) == 0
    # addmm reads bias, input and weight (a transposed view) and writes its result.
    assert by_module["2"].forward.moved_bytes(2) == 4 * (4 + 2 * 16 + 16 * 4 + 2 * 4)


def test_quantities_are_functions_of_the_batch() -> None:
    small, large = describe(Net(), IDS), describe(Net(), IDS.repeat(3, 1))
    assert small.batch_is_free and (small.local_batch, large.local_batch) == (2, 6)
    for one, other in zip(small.segments, large.segments, strict=True):
        for work, same in ((one.forward, other.forward), (one.backward, other.backward)):
            assert work.flops(6) == same.flops(6)
            assert work.moved_bytes(6) == same.moved_bytes(6)
            assert work.live_bytes(6) == same.live_bytes(6)
        assert one.saved_bytes(6) == other.saved_bytes(6)


def test_a_model_bound_to_its_batch_is_described_as_that() -> None:
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).view(2, 4)

    desc = describe(Bound(), torch.zeros(2, 4))
    assert not desc.batch_is_free
    assert desc.segments[0].forward.flops(2) == desc.segments[0].forward.flops(7) == 2 * 2 * 4 * 4


def test_the_tied_gradient_is_no_activation() -> None:
    # Both parts of it are as large as the embedding, which dwarfs everything else.
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4096, 4)
            self.head = nn.Linear(4, 4096, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids)).logsumexp(-1).sum()

    desc = describe(Tied(), torch.zeros(1, 2, dtype=torch.long))
    head = next(s for s in desc.segments if s.module == "head")
    assert head.backward.live_bytes(1) < 0
    assert desc.operators[0].modules == ("embed", "head")


def test_tied_parameters_are_one_spanning_operator() -> None:
    desc = describe(Net(), IDS)
    first = desc.operators[0]
    assert (first.name, first.modules, first.spanning, first.block) == (
        "embed",
        ("embed", "head"),
        True,
        None,
    )
    assert first.parameters[0].aliases == ("head.weight",)
    assert (first.first, first.last) == (0, len(desc.segments) - 2)
    assert not any(operator.spanning for operator in desc.operators[1:])
    assert desc.num_parameters == sum(p.numel() for p in Net().parameters())


def test_attention_owns_the_projection_it_uses_itself() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    desc = describe(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.zeros(2, 4, 8))
    attention = desc.operator("layers.1.self_attn")
    assert {p.name for p in attention.parameters} == {
        f"layers.1.self_attn.{name}"
        for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    }
    assert attention.block == "layers.1"
    assert not any("out_proj" in operator.name for operator in desc.operators)


def test_a_module_called_twice_appears_twice_and_spans() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.between = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shared(self.between(self.shared(x)))

    desc = describe(Twice(), torch.zeros(2, 4))
    assert [(s.module, s.call) for s in desc.segments][:3] == [("shared", 0), ("between", 0), ("shared", 1)]
    shared, between = desc.operators
    assert (shared.first, shared.last, shared.spanning) == (0, 2, True)
    assert (between.first, between.last, between.spanning) == (1, 1, False)


class Gate(nn.Module):
    """A repeated module that runs nothing, though it has parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_blocks_that_run_nothing_are_described() -> None:
    gates = nn.ModuleList([Gate(8), Gate(8)])
    desc = describe(nn.Sequential(nn.Linear(8, 8), *gates), torch.zeros(2, 8))
    assert not desc.block_segments
    assert [op.executed for op in desc.operators] == [True, False, False]


class Patches(nn.Module):
    """Owns a parameter, and contains another operator."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), self.project(x)], 1)


class Odd(nn.Module):
    """A root with parameters of its own, a frozen, a 0-dim and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.patches = Patches()
        self.unused = nn.Linear(3, 3)
        self.layers = nn.Sequential(Layer(4), Layer(4))
        self.layers[0].up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.patches(x)) * self.scale


def test_parameters_go_where_they_are_used() -> None:
    desc = describe(Odd(), torch.zeros(2, 3, 4))
    root, patches = desc.operator(""), desc.operator("patches")
    assert (root.first, root.last) == (0, len(desc.segments) - 1)
    assert (root.spanning, [p.shape for p in root.parameters]) == (True, [()])
    assert (patches.name, len(patches.parameters), patches.spanning) == ("patches", 3, False)
    assert not desc.operator("layers.0.up").parameters[0].trainable
    unused = desc.operators[-1]
    assert (unused.name, unused.executed, unused.first, unused.last) == ("unused", False, -1, -1)
    assert all(operator.executed for operator in desc.operators[:-1])
    assert [op.block for op in desc.operators if op.name.startswith("layers")] == ["layers.0"] * 3 + [
        "layers.1"
    ] * 3


def test_each_atom_is_one_operator() -> None:
    desc = describe(Net(layers=2, tied=False), IDS, atoms=["layers.0", "layers.1"])
    assert [op.name for op in desc.operators] == ["embed", "layers.0", "layers.1", "head"]
    assert len(desc.operator("layers.0").parameters) == 6
    assert not any(op.spanning for op in desc.operators)
    nested = describe(Net(layers=1, tied=False), IDS, atoms=["layers.0", "layers.0.up"])
    outer = nested.operator("layers.0")
    assert len(outer.parameters) == 4 and outer.spanning
    with pytest.raises(ValueError, match="layers"):
        describe(Net(), IDS, atoms=["layers"])


class Bottleneck(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        inner = width // stride
        self.convs = nn.Sequential(
            nn.Sequential(nn.Conv2d(inner, width, 3, stride, 1), nn.BatchNorm2d(width)),
            nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width)),
        )
        self.short = nn.Conv2d(inner, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convs(x) + self.short(x))


def test_the_blocks_of_a_convnet_are_its_bottlenecks() -> None:
    stages = [nn.Sequential(Bottleneck(width, 2), Bottleneck(width, 1)) for width in (8, 16)]
    desc = describe(nn.Sequential(nn.Conv2d(3, 4, 3), *stages), torch.zeros(2, 3, 12, 12))
    blocks = {op.block for op in desc.operators}
    assert blocks == {None, "1.0", "1.1", "2.0", "2.1"}


def test_plain_layers_of_different_shapes_are_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert {op.block for op in describe(model, torch.zeros(2, 4)).operators} == {None}


def test_the_model_is_left_alone() -> None:
    model = Net().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    describe(model, IDS)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m.training for m in model.modules())


class Keeper(nn.Module):
    """Holds what cannot be copied among fake tensors, and draws from what is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.constant, self.sources = torch.ones(4), [torch.Generator()]
        self.scales: list[Any] = [{"first": torch.ones(4)}]
        self.scales.append(self.scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(4, generator=self.sources[0]) * random.random()
        return self.norm(x) * self.constant * self.scales[0]["first"] + noise


def test_generators_and_plain_tensors_are_copied_and_nothing_is_drawn() -> None:
    """Neither used to be described, nor tensors in a container inside another; Python's random numbers were
    drawn, so that other data came next."""
    model = Keeper()
    weight, state, own = model.norm.weight, random.getstate(), model.sources[0].get_state()
    assert ModelDesc.from_module(model, torch.zeros(2, 4)).operator("norm").numel == 20
    assert random.getstate() == state
    assert torch.equal(model.sources[0].get_state(), own)
    assert model.norm.weight is weight


def test_a_model_on_meta_is_described_the_same() -> None:
    with torch.device("meta"):
        model = Net()
    model.head.weight = model.embed.weight
    assert describe(model, IDS.to("meta")) == describe(Net(), IDS)


def test_checkpointed_layers_are_described() -> None:
    class Checkpointed(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    plain, less = describe(Net(), IDS), describe(Checkpointed(), IDS)
    modules = [[s.module for s in desc.segments if s.module] for desc in (plain, less)]
    assert modules[0] == modules[1]
    saved = [sum(s.saved_bytes(2) for s in desc.segments) for desc in (plain, less)]
    assert saved[1] < saved[0]
    flops = [sum(s.backward.flops(2) for s in desc.segments) for desc in (plain, less)]
    assert flops[1] > flops[0]


def test_sample_inputs_come_in_any_form() -> None:
    desc = describe(Net(), IDS)
    for sample in ((IDS,), [IDS], {"ids": IDS}, UserDict(ids=IDS), SampleBatch((IDS,))):
        other = describe(Net(), sample)
        assert (other.segments, other.operators, other.sample) == (desc.segments, desc.operators, desc.sample)
    batch = SampleBatch((torch.arange(6).view(2, 3), 7), {"mask": torch.zeros(1, 3)}).resized(3)
    assert batch.args[0].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert batch.args[1] == 7 and batch.kwargs["mask"].shape == (1, 3) and batch.local_batch == 3


def test_the_loss_is_the_last_segment() -> None:
    def loss_fn(logits: torch.Tensor) -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(10).long(), reduction="sum"), 10

    desc = describe(Net(), IDS, loss_fn=loss_fn)
    last = desc.segments[-1]
    assert (last.module, last.outputs[0].shape) == ("", ()) and last.saved_bytes(2) > 0


def test_nothing_warns_of_a_batch_that_is_never_run(recwarn: pytest.WarningsRecorder) -> None:
    """Sizes are read at twice the batch, where a loss that keeps its targets warned of wrong sizes."""
    model, target = nn.Sequential(nn.Linear(4, 4)), torch.zeros(3, 4)
    desc = describe(model, torch.zeros(3, 4), loss_fn=lambda out: nn.functional.mse_loss(out, target))
    assert desc.local_batch == 3 and not recwarn.list


def test_a_description_survives_json() -> None:
    desc = describe(Odd(), torch.zeros(2, 3, 4))
    assert codec.from_json(ModelDesc, codec.to_json(desc)) == desc


def test_what_an_old_description_drops_is_unknown() -> None:
    desc = describe(Odd(), torch.zeros(2, 3, 4))
    plain = json.loads(codec.to_json(desc))
    for segment in plain["segments"]:
        del segment["dropped_bytes"], segment["released_bytes"]
    unknown = tuple(replace(segment, dropped_bytes=None, released_bytes=None) for segment in desc.segments)
    assert codec.from_json(ModelDesc, json.dumps(plain)) == replace(desc, segments=unknown)


def test_the_graph_is_the_trace() -> None:
    desc = describe(Net(), IDS)
    nodes = graph(desc)
    assert list(nodes) == list(range(len(desc.segments)))
    assert list(nodes.edges) == [(i, i + 1) for i in range(len(desc.segments) - 1)]
    assert nodes.nodes[0] == {"module": "embed", "operators": ("embed",), "flops": 0.0}


class Peeks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


class Picks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[x[:, 0] > 0])


@pytest.mark.parametrize("kind", [Peeks, Picks])
def test_a_root_that_reads_values_is_one(kind: type[nn.Linear]) -> None:
    desc = describe(kind(4, 4), torch.zeros(2, 4))
    assert [module.name for module in desc.opaque] == [""]
    assert [(operator.name, operator.cut) for operator in desc.operators] == [("", None)]


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (
            lambda: describe(Net(), torch.zeros(2, 4)),
            ValueError,
            r"rejects the sample batch \(float32\[2, 4\]\)",
        ),
        (lambda: describe(Net(), {"wrong": IDS}), ValueError, "wrong"),
        (lambda: describe(Net(), "text"), TypeError, "not str"),
        (lambda: describe(Net(), ()), ValueError, "no tensor"),
        (lambda: describe(Net(), IDS, loss_fn=lambda out: out), ValueError, r"one number, got \(2, 5, 16\)"),
        (lambda: describe(nn.LazyLinear(4), torch.zeros(2, 4)), ValueError, "has no shape yet"),
        (lambda: SampleBatch((IDS,)).resized(0), ValueError, "at least 1 sample, got 0"),
    ],
)
def test_bad_input_gets_one_clear_error(
    work: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        work()


def test_a_model_that_parallelize_module_has_split_is_refused_with_the_way_to_split_it() -> None:
    # It was said to reject the sample batch, with a message of DTensor's about mixed operands.
    run(2, describe_split_model)


def describe_split_model() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"0\.weight is a DTensor: parallelize_module .* tp= splits"):
        ModelDesc.from_module(model, torch.randn(2, 8))


class Normalised(nn.Linear):
    """Keeps its rows at length 1, as EDM2's layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.copy_(nn.functional.normalize(self.weight))
        return super().forward(x)


class Clamped(nn.Linear):
    """As layers with a constraint on their weights do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-1, 1)
        return super().forward(x)


class Assigned(nn.Linear):
    """As MoCo's key encoder and EEGNet's layers are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Normalised, Clamped, Assigned])
def test_weights_that_forward_writes_to_are_refused(kind: type[nn.Linear]) -> None:
    # Such a change stayed where the plan replicates, and was lost where it shards.
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 4))
    with pytest.raises(ValueError, match=r"1\.weight is written to in the .*forward.* after optimizer\.step"):
        describe(model, torch.zeros(2, 4))


class Prior:
    """An object that torch does not know, with a tensor."""

    def __init__(self) -> None:
        self.mean = torch.ones(4)


class Holding(nn.Module):
    """Holds such an object, and a module that is none of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.prior, self.teacher = nn.Linear(4, 4), Prior(), [nn.BatchNorm1d(4).eval()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher[0](x)
        return (self.layer(x) - self.prior.mean - wanted).square().sum()


def test_tensors_in_objects_and_in_hidden_modules_are_copied() -> None:
    """deepcopy refused them among fake tensors, in words about subclasses of tensors."""
    model, x = Holding(), torch.randn(3, 4)
    desc = describe(model, x)
    assert [operator.name for operator in desc.operators] == ["layer"]
    assert profile_model(model, desc, x, device="cpu", progress=False).measured


def test_what_cannot_be_copied_is_named() -> None:
    model = Holding()
    model.layer.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"layer\.lock cannot be copied \(cannot pickle .* after wrapping"):
        describe(model, torch.randn(3, 4))


class Slope(nn.Module):
    """Differentiates what it computes by its input, as networks of physics do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.tanh(self.first(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().mean()


def test_inputs_that_require_a_gradient_are_described_so() -> None:
    """They required none: the model was said to reject its batch, and no gradient of it was planned for."""
    x = torch.randn(3, 4, requires_grad=True)
    desc = describe(Slope(), x)
    assert desc.batch_is_free and all(operator.executed for operator in desc.operators)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cuts = [describe(model, given).operators[0].cut for given in (x, x.detach())]
    assert [cut is not None and cut.feeds_back for cut in cuts] == [True, False]
