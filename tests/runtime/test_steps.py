"""What ``predict`` gives to the ranks that did not compute it."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutput

from osdp.runtime.steps import _to_all
from tests.helpers.distributed import run


def received() -> tuple[str, Any, Any]:
    here = dist.get_rank() == 1
    logits = torch.arange(6.0).reshape(2, 3).t() if here else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = _to_all(
            {"output": CausalLMOutput(logits=logits), "rest": [7, None]} if here else None,
            dist.group.WORLD,  # type: ignore[arg-type]
            1,
            torch.device("cpu"),
        )
    return type(got["output"]).__name__, got["output"].logits.tolist(), got["rest"]


def test_outputs_arrive_as_they_were_without_a_warning() -> None:
    """The structure was sent as torch's own description of it, which warned wherever it arrived."""
    assert run(2, received) == [("CausalLMOutput", [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [7, None])] * 2
