"""Flows: which values go from step to step, where a model can be cut, and what a stage is made of."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from osdp import ModelDesc
from osdp.model.dataflow import CutBarrier, Dataflow, ModuleCall, StepInput, Value, transfers
from osdp.model.description import Affine
from osdp.runtime.pipeline.output_shapes import twins_of
from osdp.runtime.pipeline.placeholders import Placeholder, PlaceholderError, placeholder_like
from osdp.runtime.pipeline.stage import StageModule, build_stage
from osdp.search.pipeline.stage_description import stage_desc, stage_modules, step_segments, ties_of
from osdp.tracing.dataflow import movable_modules, trace_flow
from tests.helpers.stage_nets import WIDTH, TiedNet, UncutNet, batch


def value(step: int) -> Value:
    return Value(step, "float32", Affine(0.0, 4.0), True)


#: Three steps: the first's value goes to both others, the second's to the third.
CHAIN = Dataflow(
    steps=(
        ModuleCall("a", 0, ()),
        ModuleCall("b", 0, (StepInput(0, 0),)),
        ModuleCall("c", 0, (StepInput(1, 0), StepInput(0, 2))),
    ),
    values=(value(0), value(1)),
)


def test_each_value_goes_once_and_directly_to_every_stage_that_uses_it() -> None:
    found = transfers(CHAIN, (0, 1, 2, 3))
    assert [(t.source, t.target, t.value) for t in found] == [(0, 1, 0), (0, 2, 0), (1, 2, 1)]
    assert found[1].taken == found[0].taken  # where it leaves is where the first user takes it
    assert [(t.source, t.target) for t in transfers(CHAIN, (0, 2, 3))] == [(0, 1), (0, 1)]
    assert CHAIN.crossing(1) == (0,) and CHAIN.crossing(2) == (0, 1)
    assert CHAIN.values[0].nbytes(3) == 48


def test_wrong_bounds_are_all_named() -> None:
    barred = Dataflow(CHAIN.steps, CHAIN.values, bars=(CutBarrier(2, 2, "reason"),))
    with pytest.raises(ValueError, match=r"stage 1 would have no step.*before 'c': reason"):
        barred.check((0, 2, 2, 3))
    assert barred.cuts == (1,)


def test_flow_of_a_model_with_a_loose_parameter_and_values_that_skip_blocks() -> None:
    flow = trace_flow(TiedNet(), batch(2))
    assert [step.module for step in flow.steps] == [
        "embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head",
    ]  # fmt: skip
    assert flow.loose == (("gain", 0),)
    assert flow.cuts == (1, 2, 3, 4, 5, 6)
    # The embedding goes to every later block, beside what the block before made; the mask is made again.
    assert [len(flow.crossing(cut)) for cut in flow.cuts] == [1, 2, 2, 2, 1, 1]
    assert flow.values[0].nbytes(2) == 2 * 5 * WIDTH * 4


def test_a_model_whose_own_code_needs_earlier_values_is_cut_elsewhere_or_refused() -> None:
    flow = trace_flow(UncutNet(), torch.zeros(2, WIDTH))
    assert flow.cuts == ()
    with pytest.raises(ValueError, match="that is not among its arguments"):
        flow.check((0, 1, 3))
    with pytest.raises(ValueError, match=r"cannot be cut: stages consist of whole .*, of which it has 1"):
        trace_flow(nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.zeros(2, WIDTH))


def stages_of(model: nn.Module, flow: Dataflow, bounds: tuple[int, ...]) -> list[StageModule]:
    moves = transfers(flow, bounds)
    twins = twins_of(model, movable_modules(model))
    desc = ModelDesc.from_module(model, batch(2))
    stages = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        kept = stage_modules(desc, flow, start, stop)
        loose = [name for name, step in flow.loose if start <= step < stop]
        stages.append(
            build_stage(
                model,
                index,
                kept,
                loose,
                twins,
                moves,
                is_last=index == len(bounds) - 2,
                device=torch.device("cpu"),
            )
        )
        stages[-1].watch(kept)
    return stages


@pytest.mark.parametrize("bounds", [(0, 1, 7), (0, 3, 5, 7), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_stages_after_each_other_compute_what_the_model_does(bounds: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = TiedNet()
    flow = trace_flow(model, batch(2))
    stages = stages_of(model, flow, bounds)
    for length in (5, 9):  # not only as traced
        inputs = batch(3, length)
        known: dict[int, torch.Tensor] = {}
        for stage in stages:
            output = stage.forward([known[t.value] for t in stage.incoming], (), inputs)
            known |= {t.value: tensor for t, tensor in zip(stage.outgoing, output.sent, strict=True)}
        assert torch.equal(output.result, model(**inputs))
    names = [name for stage in stages for name, _ in stage.model.named_parameters()]
    assert set(names) == {name for name, _ in model.named_parameters(remove_duplicate=False)} & set(names)
    assert "gain" in names and names.count("blocks.1.up.weight") == 1


def test_the_descriptions_of_stages_partition_that_of_the_model() -> None:
    model = TiedNet()
    model_desc, flow = ModelDesc.from_module(model, batch(2)), trace_flow(model, batch(2))
    bounds = (0, 3, 7)
    first = (0, *step_segments(model_desc, flow)[1:], len(model_desc.segments))
    homes = [stage_modules(model_desc, flow, a, b) for a, b in pairwise(bounds)]
    movable = [module for home in homes for module in home]
    parts = [
        stage_desc(model_desc, (first[a], first[b]), home, ("gain",) if a == 0 else (), movable)
        for (a, b), home in zip(pairwise(bounds), homes, strict=True)
    ]
    assert sum(len(part.segments) for part in parts) == len(model_desc.segments)
    held = [{p.name for op in part.operators for p in op.parameters} for part in parts]
    assert "embed.weight" in held[0] and "head.weight" in held[1] and "gain" in held[0]
    assert held[0].isdisjoint(held[1])
    for part in parts:
        for operator in part.operators:
            assert not operator.spanning or operator.name == ""
            assert 0 <= operator.first <= operator.last < len(part.segments)
    (tie,) = ties_of(model_desc, homes)
    assert tie.stages == (0, 1) and tie.names == ("embed.weight", "head.weight")


class Adding(nn.Module):
    """The code around its blocks adds what they make to a tensor that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape)
        total += self.blocks[1](self.blocks[0](x))
        out: torch.Tensor = self.blocks[3](self.blocks[2](total))
        return out


def test_nothing_is_cut_after_a_write_into_what_every_stage_makes() -> None:
    """A later stage computed with the zeros, since only its own sum was absent."""
    flow = trace_flow(Adding(), (torch.ones(3, 2),))
    assert flow.cuts == (1,)
    with pytest.raises(ValueError, match="written in place into one that each stage makes"):
        flow.check((0, 2, 4))


def test_modules_of_one_shape_of_parameters_may_return_others() -> None:
    convolutions = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, stride=2))
    twins = twins_of(convolutions, ("0", "1"))
    shapes = [tuple(twins[name].outputs((torch.ones(1, 2, 8, 8),), {}).shape) for name in ("0", "1")]
    assert shapes == [(1, 2, 8, 8), (1, 2, 4, 4)]


def test_placeholders_have_shapes_but_no_values() -> None:
    gone = placeholder_like(torch.empty(2, 3, dtype=torch.bfloat16))
    made = (gone.float() + torch.ones(4, 2, 3)).mean(-1)
    assert isinstance(made, Placeholder) and made.shape == (4, 2) and made.dtype == torch.float32
    assert not isinstance(torch.zeros_like(gone), Placeholder)
    assert torch.equal(gone.new_ones(2), torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(PlaceholderError, match="another stage holds"):
        bool(gone.sum() > 0)


class Denoising(nn.Module):
    """Draws noise for its blocks, and may compare with it what they make."""

    def __init__(self, compares: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.compares = compares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        made = x + 0.5 * noise
        for block in self.blocks:
            made = block(made)
        return made - noise if self.compares else made


def test_numbers_that_several_stages_would_draw_stay_in_one() -> None:
    """The last stage compared with noise of its own."""
    x = (torch.ones(3, 2),)
    assert trace_flow(Denoising(compares=False), x).cuts == (1, 2, 3)
    flow = trace_flow(Denoising(compares=True), x)
    assert flow.cuts == ()
    with pytest.raises(ValueError, match=r"random numbers .* pass them as an input"):
        flow.check((0, 2, 4))


class DroppingBlocks(nn.Module):
    """Drops blocks at random, but the last."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.probability = probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-1]:  # type: ignore[misc]
            if bool(torch.rand([]) < self.probability):
                continue
            x = block(x)
        out: torch.Tensor = self.blocks[-1](x)
        return out


def test_no_stage_begins_with_a_block_that_may_be_dropped() -> None:
    """Where it was, nothing was there to send, and the step failed."""
    x = (torch.ones(3, 2),)
    assert trace_flow(DroppingBlocks(0.0), x).cuts == (1, 2, 3)
    flow = trace_flow(DroppingBlocks(0.5), x)
    assert [step.module for step in flow.steps] == [f"blocks.{index}" for index in range(4)]
    assert flow.cuts == (3,)
    with pytest.raises(ValueError, match=r"'blocks\.2' is dropped at random"):
        flow.check((0, 2, 4))
