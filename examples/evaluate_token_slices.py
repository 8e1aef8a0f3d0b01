"""Run the slices that were found on this device: ``python -m examples.evaluate_token_slices slices.json``.

One stage runs each slicing for real, forward and then backward; the other stages are taken to be like it.
Beside the prediction by the fitted model stands the step with the measured times of the same slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.solve_token_slices import Solution
from examples.token_options import add_stage, in_one_line, make_parser, make_stage
from osdp import codec
from osdp.cost.pipeline.simulate import StageCost, simulate
from osdp.cost.token_slices.step import slice_tables
from osdp.hardware.token_latency import SliceSample
from osdp.plan.schedule import make_schedule
from osdp.profiler.token_latency import DecoderStage, measure_slices
from osdp.search.token_slices.planner import TokenChoice
from osdp.text import format_seconds


@dataclass(frozen=True)
class Evaluation:
    """One slicing.

    Attributes:
        name: Which.
        choice: What was predicted.
        slices: Its slices, measured.
        measured_seconds: The step with these times.
    """

    name: str
    choice: TokenChoice
    slices: tuple[SliceSample, ...]
    measured_seconds: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return self.choice.seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class Evaluations:
    """All slicings of a solution."""

    of: tuple[Evaluation, ...]


def evaluate(
    solution: Solution, stage: DecoderStage, name: str, choice: TokenChoice, repeats: int
) -> Evaluation:
    """Measure one slicing."""
    pipelines = solution.devices // choice.num_stages
    batch = solution.batch // pipelines // choice.num_microbatches
    measured = measure_slices(stage, choice.slices, batch=batch, repeats=repeats)
    per_stage = solution.layers / choice.num_stages
    link = solution.link if choice.num_stages > 1 else None
    tables = slice_tables(
        solution.latency, batch, solution.length, granularity=solution.granularity, link=link
    )
    costs = [
        StageCost(
            sample.forward_seconds * per_stage / stage.num_layers,
            sample.backward_seconds * per_stage / stage.num_layers,
            send_seconds=cost.send_seconds,
            send_gradient_seconds=cost.send_gradient_seconds,
        )
        for sample, cost in zip(measured, tables.costs(choice.slices), strict=True)
    ]
    schedule = make_schedule(
        choice.schedule, choice.num_stages, choice.num_microbatches, num_slices=len(costs)
    )
    return Evaluation(name, choice, measured, simulate(schedule, [costs] * choice.num_stages).seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("evaluate_token_slices", __doc__.splitlines()[0])
    parser.add_argument("solution", type=Path, help="what solve_token_slices wrote")
    add_stage(parser)
    parser.add_argument("--repeats", type=int, default=3, help="how often each slicing is run")
    parser.add_argument("--out", type=Path, default=Path("token_evaluation.json"), help="where to write")
    options = parser.parse_args(arguments)
    solution = codec.load(Solution, options.solution)
    if options.length not in (None, solution.length):
        raise ValueError(
            f"{options.solution} is for sequences of {solution.length} tokens, --length says {options.length}"
        )
    stage = make_stage(options, solution.length)
    if stage.name != solution.latency.model:
        raise SystemExit(
            f"error: {options.solution} is for {solution.latency.model}, the flags make {stage.name}"
        )
    outcome = solution.outcomes[0]
    found = []
    for name, choice in (("best", outcome.best), ("uniform", outcome.uniform), ("whole", outcome.whole)):
        if choice is None or (name != "best" and choice == outcome.best):
            continue
        found.append(evaluate(solution, stage, name, choice, options.repeats))
        print(
            f"{name:8s} {choice.schedule}, {choice.num_stages} stages, {choice.num_microbatches} "
            f"microbatches of {choice.slices.num_slices} slices: predicted {format_seconds(choice.seconds)}, "
            f"measured {format_seconds(found[-1].measured_seconds)} ({found[-1].error:+.1%})"
        )
    codec.save(Evaluations(tuple(found)), options.out)


if __name__ == "__main__":
    in_one_line(main)
