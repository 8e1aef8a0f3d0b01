"""Fit measured slices and find the best ones: ``python -m examples.solve_token_slices token_latency.json``.

Several ``--stages`` and ``--schedules`` are compared for the same devices, layers and batch, by the seconds
of the layers: embedding, head, reductions over data-parallel pipelines and the optimizer are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.token_options import in_one_line, make_parser, numbers
from osdp import codec
from osdp.cost.token_slices.latency_fit import fit
from osdp.cost.token_slices.step import slice_tables
from osdp.hardware.device_info import DeviceInfo, PointToPointLink
from osdp.hardware.token_latency import TokenLatency, TokenSamples
from osdp.search.token_slices.planner import TokenChoice, TokenOutcome, TokenSliceProblem, solve_jointly
from osdp.text import format_seconds


@dataclass(frozen=True)
class Solution:
    """What was found.

    Attributes:
        latency: The fitted model, with its residuals.
        length: Tokens of a sequence.
        granularity: Tokens between places where slices may end.
        layers: Layers of the model.
        devices: Of all pipelines.
        batch: Sequences of a step, of all pipelines.
        link: The way from stage to stage; ``None`` is free.
        outcomes: Of each number of stages and schedule, fastest first.
    """

    latency: TokenLatency
    length: int
    granularity: int
    layers: int
    devices: int
    batch: int
    link: PointToPointLink | None
    outcomes: tuple[TokenOutcome, ...]


def solve(
    latency: TokenLatency,
    *,
    length: int,
    granularity: int,
    layers: int,
    devices: int,
    stages: Sequence[int],
    batch: int,
    schedules: Sequence[str],
    link: PointToPointLink | None,
) -> Solution:
    """The best slices for each number of stages that divides the devices, whose pipelines share the batch.

    Raises:
        ValueError: A number does not divide what it must.
    """
    problems = []
    for num_stages in stages:
        pipelines, rest = divmod(devices, num_stages)
        if rest or layers % num_stages:
            raise ValueError(f"{num_stages} stages must divide {devices} devices and {layers} layers")
        if batch % pipelines:
            raise ValueError(
                f"{devices} devices in {num_stages} stages are {pipelines} pipelines, which must divide the "
                f"batch of {batch}"
            )
        own = batch // pipelines
        tables = {
            entry.batch: slice_tables(
                latency,
                entry.batch,
                length,
                granularity=granularity,
                num_layers=layers // num_stages,
                link=link if num_stages > 1 else None,
            )
            for entry in latency.batches
        }
        problems += [TokenSliceProblem(tables, own, num_stages, schedule) for schedule in schedules]
    outcomes = solve_jointly(problems)
    return Solution(latency, length, granularity, layers, devices, batch, link, outcomes)


def _line(what: str, choice: TokenChoice | None) -> str:
    if choice is None:
        return f"  {what:8s} not measured"
    lengths = choice.slices.lengths
    return (
        f"  {what:8s} {format_seconds(choice.seconds):>8s}  {choice.num_microbatches} microbatches, "
        f"{len(lengths)} slices {list(lengths)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("solve_token_slices", __doc__.splitlines()[0])
    parser.add_argument("latency", type=Path, help="what collect_token_latency wrote")
    parser.add_argument("--length", type=int, help="tokens of a sequence; by default the longest measured")
    parser.add_argument("--granularity", type=int, default=8, help="tokens between places to cut")
    parser.add_argument("--layers", type=int, help="layers of the model; by default those measured per stage")
    parser.add_argument("--devices", type=int, help="by default the largest number of stages")
    parser.add_argument("--stages", type=numbers, default=[4], help="numbers of stages, as in 2,4")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step, of all pipelines")
    parser.add_argument("--schedules", default="gpipe,1f1b", help="as in gpipe,1f1b")
    parser.add_argument("--device-info", type=Path, help="JSON of a DeviceInfo whose stage_link is the way")
    parser.add_argument("--out", type=Path, default=Path("token_slices.json"), help="where to write")
    options = parser.parse_args(arguments)
    latency = fit(TokenSamples.load(options.latency))
    most = max(options.stages)
    solution = solve(
        latency,
        length=options.length or max(entry.forward.lengths[-1] for entry in latency.batches),
        granularity=options.granularity,
        layers=options.layers or latency.num_layers * most,
        devices=options.devices or most,
        stages=options.stages,
        batch=options.batch,
        schedules=options.schedules.split(","),
        link=DeviceInfo.load(options.device_info).stage_link if options.device_info else None,
    )
    codec.save(solution, options.out)
    for entry in latency.batches:
        print(
            f"{latency.model}, {entry.batch} at a time: the fit is off by {entry.forward.mean_residual:.1%} "
            f"(at most {entry.forward.residual:.1%}) in forward, {entry.backward.mean_residual:.1%} (at most "
            f"{entry.backward.residual:.1%}) in backward"
        )
    for outcome in solution.outcomes:
        best = outcome.best
        print(
            f"{best.num_stages} stages, {best.schedule}: at most {outcome.gap:.2%} from the best by the fit"
        )
        print(_line("best", best), _line("uniform", outcome.uniform), _line("whole", outcome.whole), sep="\n")


if __name__ == "__main__":
    in_one_line(main)
