"""Predicted peaks against the true peak of live bytes, of real tensors under the fake process group."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.memory_accuracy import BASE, Point, Ranks, check
from benchmarks.support.candidates import UNLIMITED, Setting
from benchmarks.support.models import CASES, Case, gpt2
from osdp import DeviceInfo, Link, Training
from osdp.cost.evaluate import evaluate
from osdp.cost.sharding.timeline import LOOSE_BYTES
from osdp.hardware.device_info import COLLECTIVES
from osdp.plan.sharding import Mode, Unit
from tests.helpers.settings import setting_of


@pytest.mark.parametrize("case", [pytest.param("gpt2-small", marks=pytest.mark.slow), "mlp"])
def test_the_prediction_is_within_five_percent_and_never_exceeded(case: str) -> None:
    torch.set_num_threads(1)
    setting = setting_of(CASES[case], BASE)
    for world_size in (2, 64):
        ranks = Ranks(1, world_size, backend="fake")
        for plan in ({"strategy": "FULL_SHARD"}, 0.5):
            row = check(Point(case, ranks, plan, BASE), setting, "cpu")
            assert abs(row["relative_error"]) <= 0.05, row
            assert not row["exceeds"], row


BFLOAT16 = replace(BASE, param_dtype="bfloat16", reduce_dtype="float32")
#: Few activations, and an optimizer without temporaries.
FEW = Training(optimizer="SGD", param_dtype="bfloat16", local_batch=2, microbatches=2)


@pytest.mark.parametrize(
    ("case", "strategy", "training"),
    [
        # The head's gradient was counted beside what its backward had freed by then, as was its bucket.
        pytest.param("llama", "NO_SHARD", BASE, id="bucket"),
        # Gradients that are added in place were counted until the next ones, beside a reduction's input.
        pytest.param("mlp", "FULL_SHARD", replace(BASE, microbatches=2), id="accumulated"),
        # The copies that change the dtype, of one gradient after the other, were counted together.
        pytest.param("bert", "FULL_SHARD", BFLOAT16, id="cast"),
        # Residuals that are freed in bfloat16 alone were counted as kept.
        pytest.param("llama", "FULL_SHARD", BFLOAT16, id="residuals"),
        # Buckets that accumulate in bfloat16 are cast in the end; 32 % were missing.
        pytest.param("mlp", "NO_SHARD", FEW, id="cast-in-the-end"),
        # On CPUs torch copies a gradient that it adds to a sum of another dtype; buckets add in pieces.
        pytest.param("mlp", "NO_SHARD", replace(FEW, reduce_dtype="float32"), id="added"),
    ],
)
def test_what_is_not_alive_together_is_not_counted_together(
    case: str, strategy: str, training: Training
) -> None:
    torch.set_num_threads(1)
    setting = setting_of(CASES[case], training)
    ranks = Ranks(1, 64, backend="fake")
    row = check(Point(case, ranks, {"strategy": strategy}, training), setting, "cpu")
    assert 0 <= row["relative_error"] <= 0.005, row
    assert not row["exceeds"], row


class Doubled(nn.Module):
    """A block that saves nothing of its input, only what it makes of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layers make of twice the input."""
        return self.down(self.up(2 * x))


class Doubling(nn.Module):
    """Blocks whose inputs nobody saves; the caller lets go of them in between if it ``doubles`` them."""

    def __init__(self, width: int, depth: int, *, doubles: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Doubled(width) for _ in range(depth))
        self.doubles = doubles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what the last block makes."""
        for layer in self.layers:
            x = layer(2 * x) if self.doubles else layer(x)
        return x.sum()


@pytest.mark.parametrize("doubles", [False, True])
def test_a_recomputed_block_holds_its_input_until_its_backward_has_ended(doubles: bool) -> None:
    """Forward would have freed it: nothing but the recomputation needs it."""
    torch.set_num_threads(1)
    width = 64

    def batch(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(size, width, generator=generator)}

    case = Case("doubling", lambda: Doubling(width, 4, doubles=doubles), batch, ("layers",))
    training = Training(local_batch=8192)
    setting = setting_of(case, training)
    device = replace(Ranks(1, 2, backend="fake").devices("cpu"), memory_limit=UNLIMITED)
    kept = setting.plan(device, strategy="FULL_SHARD")
    for blocks in (("layers.3",), ("layers.1", "layers.2")):
        plan = kept.with_sharding(recomputed=blocks)
        predicted = evaluate(plan, setting.profile, device, training, setting.model_desc).peak_bytes
        peak = setting.candidate(device, plan).memory(2).peak
        assert peak <= predicted <= 1.01 * peak, blocks


class Mixer(nn.Module):
    """One operator of two layers around what takes most memory, with a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((8 * width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input, and what the layers make of its squares."""
        found = torch.tanh(self.up(x) * self.scale)
        wide = found.repeat(1, 8).square().view(len(x), 8, -1).sum(1)
        return x + self.down(wide[:, : x.shape[1]])


class Mixers(nn.Sequential):
    """Several of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what they make."""
        return super().forward(x).sum()


def test_gradients_that_have_not_come_are_not_counted() -> None:
    """Those of all layers of Mamba's mixers were counted where its scan is, before its first layer's come."""
    torch.set_num_threads(1)
    width = 128

    def batch(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(size, width, generator=generator)}

    case = Case("mixers", lambda: Mixers(*(Mixer(width) for _ in range(3))), batch, ())
    training = Training(local_batch=32)
    setting = setting_of(case, training)
    assert any(len(operator.parameters) == 5 for operator in setting.model_desc.operators)
    device = replace(Ranks(1, 64, backend="fake").devices("cpu"), memory_limit=UNLIMITED)
    plan = setting.plan(device, strategy="FULL_SHARD")
    peak = setting.candidate(device, plan).memory(64).peak
    assert peak <= plan.predicted.peak_bytes <= 1.01 * peak


class Rotated(nn.Module):
    """Its tables are no parameters: the caller gives them to all layers in a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The input, and what the layers make of it between the tables."""
        return x + self.down(tables[1] * torch.relu(self.up(tables[0] * x)))


class Rotating(nn.Module):
    """Many layers with tables of 8 KiB, as rotary embeddings give them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rotated(width) for _ in range(depth))
        self.head = nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what a head makes of the last layer's output."""
        angles = torch.arange(32 * x.shape[-1], device=x.device).view(32, -1) / 100
        tables = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, tables)
        return self.head(x).tanh().sum()


def test_what_recomputed_blocks_keep_of_their_state_is_counted() -> None:
    """Each keeps a random state, and once had copies of the tables."""
    torch.set_num_threads(1)
    width, depth = 64, 12

    def batch(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(size, 32, width, generator=generator)}

    case = Case("rotating", lambda: Rotating(width, depth), batch, ("layers",))
    training = Training(local_batch=64)
    setting = setting_of(case, training)
    device = replace(Ranks(1, 2, backend="fake").devices("cpu"), memory_limit=UNLIMITED)
    plan = setting.plan(device, strategy="FULL_SHARD").with_sharding(
        recomputed=tuple(f"layers.{index}" for index in range(depth - 1))
    )
    predicted = evaluate(plan, setting.profile, device, training, setting.model_desc).peak_bytes
    peak = setting.candidate(device, plan).memory(2).peak
    assert peak <= predicted <= peak + 2 * LOOSE_BYTES


class Recurrent(nn.Module):
    """The gradients of an LSTM's matrices are made by one operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # They make the bucket larger than what the operation needs for itself.
        self.first = nn.Sequential(*(nn.Linear(width + k, width + k + 1) for k in range(16)))
        self.lstm = nn.LSTM(width + 16, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all outputs."""
        return self.lstm(self.first(x))[0].sum()


def test_gradients_that_one_operation_makes_are_there_together() -> None:
    """All of them are alive when the first one opens the bucket."""
    torch.set_num_threads(1)
    width = 256

    def batch(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(size, 4, width, generator=generator)}

    case, training = (
        Case("recurrent", lambda: Recurrent(width), batch, ()),
        Training(local_batch=2, optimizer="SGD"),
    )
    setting = setting_of(case, training)
    device = replace(Ranks(1, 2, backend="fake").devices("cpu"), memory_limit=UNLIMITED)
    plan = setting.plan(device, strategy="NO_SHARD")
    peak = setting.candidate(device, plan).memory(2).peak
    assert peak <= plan.predicted.peak_bytes <= 1.02 * peak


def in_groups(nodes: int, per_node: int, *, by_exchange: bool) -> DeviceInfo:
    """Links of equal speed: peaks do not ask."""
    size = nodes * per_node
    groups = {"world": size, f"inside {per_node}": per_node, f"across {per_node}": nodes}
    links = tuple(
        Link(name, group, ranks, 1e-4, 1e9, by_exchange=by_exchange and name == "reduce_scatter")
        for group, ranks in (groups | {f"two_step {per_node}": size}).items()
        for name in COLLECTIVES
    )
    return DeviceInfo(
        memory_limit=UNLIMITED,
        nodes=nodes,
        devices_per_node=per_node,
        links=links,
        copies_messages=False,
    )


@pytest.fixture(scope="module")
def setting() -> Setting:
    """A model whose tied embedding is a large part, in the root's unit."""
    torch.set_num_threads(1)
    return setting_of(gpt2("gpt2-words", layers=2, width=64, heads=2, length=32, vocab=4000), BASE)


@pytest.mark.parametrize("by_exchange", [False, True])
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), pytest.param(2, 8, marks=pytest.mark.slow)])
def test_no_route_takes_more_than_predicted(
    setting: Setting, nodes: int, per_node: int, by_exchange: bool
) -> None:
    device = in_groups(nodes, per_node, by_exchange=by_exchange)
    for options in (
        {"strategy": "FULL_SHARD", "two_step": False},
        {"strategy": "FULL_SHARD", "two_step": True},
        {"strategy": "HYBRID_SHARD"},
    ):
        plan = setting.plan(device, **options)
        assert any(unit.root for unit in plan.units)
        peak = setting.candidate(device, plan).memory(nodes * per_node).peak
        predicted = plan.predicted.peak_bytes
        assert 0.999 * peak <= predicted <= 1.05 * peak, (options, plan.predicted.peak_moment)


def test_all_that_a_recomputed_block_is_given_is_held() -> None:
    """A decoder's blocks are given its memory, too, which their caller holds up to the end of forward."""
    torch.set_num_threads(1)
    setting = setting_of(CASES["transformer"], BASE)
    device = Ranks(1, 64, backend="fake").devices("cpu")
    kept = setting.plan(device, strategy="FULL_SHARD")
    device = replace(device, memory_limit=kept.memory_limit)
    for block in ("encoder.layers.0", "decoder.layers.1"):
        plan = kept.with_sharding(recomputed=(f"transformer.{block}",))
        predicted = evaluate(plan, setting.profile, device, plan.training, setting.model_desc).peak_bytes
        peak = setting.candidate(device, plan).memory(64).peak
        assert peak <= predicted <= 1.015 * peak, block


class Tall(nn.Module):
    """Many rows, so that what is computed takes more than what computes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what the layers make."""
        return self.down(self.up(x)).sum()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_slices_add_up_is_counted(dtype: str | None) -> None:
    """In 16 bits they add up an input's gradient in float32: three times what it takes in one piece."""
    torch.set_num_threads(1)
    width = 64

    def batch(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(size, width, generator=generator)}

    case = Case("tall", lambda: Tall(width), batch, ())
    training = Training(local_batch=4096, optimizer="SGD", param_dtype=dtype)
    setting = setting_of(case, training)
    device = replace(Ranks(1, 2, backend="fake").devices("cpu"), memory_limit=UNLIMITED)
    plan = setting.plan(device, strategy="NO_SHARD")
    decisions = tuple(
        replace(each, mode=Mode.FULL_SHARD, slices=4, sliced_by="output") if each.operator == "down" else each
        for each in plan.decisions
    )
    units = tuple(Unit(each.mode, (each.operator,), each.modules) for each in decisions)
    plan = plan.with_sharding(decisions=decisions, units=units, optimal=False)
    predicted = evaluate(plan, setting.profile, device, training, setting.model_desc).peak_bytes
    peak = setting.candidate(device, plan).memory(2).peak
    assert peak <= predicted <= 1.1 * peak
