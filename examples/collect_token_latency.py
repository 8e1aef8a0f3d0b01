"""Measure slices of sequences on one stage: ``python -m examples.collect_token_latency --out l.json``."""

from collections.abc import Sequence
from pathlib import Path

from examples.token_options import add_stage, in_one_line, make_parser, make_stage, numbers
from osdp.profiler.token_latency import measure_token_latency
from osdp.text import format_seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("collect_token_latency", __doc__.splitlines()[0])
    add_stage(parser, 1024)
    parser.add_argument("--batches", type=numbers, default=[1], help="sequences at a time, as in 1,2,4")
    parser.add_argument("--granularity", type=int, default=8, help="slices are multiples of so many tokens")
    parser.add_argument("--repeats", type=int, default=5, help="how often each slice is run")
    parser.add_argument("--out", type=Path, default=Path("token_latency.json"), help="where to write")
    options = parser.parse_args(arguments)
    measured = measure_token_latency(
        make_stage(options, options.length),
        options.length,
        batches=options.batches,
        granularity=options.granularity,
        repeats=options.repeats,
    )
    measured.save(options.out)
    print(f"{measured.model} on {measured.device}: {len(measured.samples)} slices in {options.out}")
    for sample in measured.samples:
        print(
            f"{sample.batch} x {sample.length} tokens after {sample.context}: forward "
            f"{format_seconds(sample.forward_seconds)}, backward {format_seconds(sample.backward_seconds)}"
        )


if __name__ == "__main__":
    in_one_line(main)
