"""What the scripts of token slices share: which stage, and where results go."""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from osdp.integrations.huggingface.decoder_stage import decoder_stage
from osdp.profiler.segments import default_device
from osdp.profiler.token_latency import DecoderStage

DTYPES = ("float32", "bfloat16", "float16", "float64")


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser whose help tells the defaults."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    return argparse.ArgumentParser(prog=name, description=description, formatter_class=shown)


def in_one_line(main: Callable[[], None]) -> None:
    """Call it; what is wrong with its input is told without a traceback."""
    try:
        main()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def add_stage(parser: argparse.ArgumentParser, length: int | None = None) -> None:
    """Flags of the stage that is measured; ``length`` is the default of its sequences."""
    parser.add_argument("--model", default="gpt2", help="gpt2, gpt2-medium, ... or a model_type, as llama")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of its config")
    parser.add_argument("--layers", type=int, default=1, help="layers of the stage")
    parser.add_argument("--length", type=int, default=length, help="tokens of a sequence")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of parameters and activations")


def make_stage(options: argparse.Namespace, length: int) -> DecoderStage:
    """The stage that the flags say, on the GPU where there is one, else on one core."""
    device = default_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    return decoder_stage(
        options.model,
        dict(_field(text) for text in options.set),
        num_layers=options.layers,
        length=length,
        device=device,
        dtype=getattr(torch, options.dtype),
    )


def numbers(text: str) -> list[int]:
    """Numbers written as in ``1,2,4``."""
    return [int(word) for word in text.split(",")]


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"error: --set takes name=value, got {text}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
