"""Decoders that sleep, and the figures of the claim about token slices."""

import time

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.support.token_stages import napping
from benchmarks.token_pipeline import OPTIMAL, decoder, short, summary
from osdp.hardware.token_latency import BatchLatency, PassLatency
from osdp.integrations.huggingface.slice_cache import SliceCache
from osdp.runtime.token_slices.kv_prefix import Prefix

#: 40 ms for 8 tokens forward and 80 ms backward; 10 ms more for each 8 tokens of context.
LATENCY = BatchLatency(
    1,
    PassLatency((8,), (0.04,), (0.0, 0.0, 0.01 / 8, 0.0)),
    PassLatency((8,), (0.08,), (0.0, 0.0, 0.01 / 8, 0.0)),
)


def test_a_napping_block_takes_what_a_slice_takes_after_its_context() -> None:
    model = napping(decoder(1, 32, 16), "sleeping", LATENCY).model()
    prefix, tokens = Prefix(SliceCache.of(model)()), torch.ones(1, 8, dtype=torch.int64)
    for forward, backward in ((0.04, 0.08), (0.05, 0.09)):
        start = time.perf_counter()
        _, loss = prefix.forward(lambda more: model(input_ids=tokens, **more).logits.sum(), 8)
        middle = time.perf_counter()
        loss.backward()
        assert middle - start >= forward
        assert time.perf_counter() - middle >= backward


def test_awake_it_computes_the_same() -> None:
    case, tokens = decoder(2, 32, 16), torch.ones(1, 8, dtype=torch.int64)
    plain = case.model()(input_ids=tokens).logits
    assert torch.equal(napping(case, "awake", None).model()(input_ids=tokens).logits, plain)


def test_the_summary_is_of_one_sequence_a_step() -> None:
    row = {"way": OPTIMAL, "time_error": -0.05, "gradient_error": 1e-6, "over_uniform": 1.1}
    rows = [
        row | {"ranks": 2, "batch": 1, "speedup": 1.6},
        row | {"ranks": 2, "batch": 2, "speedup": 1.2},
        row | {"ranks": 4, "batch": 1, "speedup": 2.7},
    ]
    found = summary(rows)
    assert found["speedup_two_stages"] == 1.6 and found["speedup_four_stages"] == 2.7
    assert found["prediction_error"] == 0.05 and found["optimal_over_uniform"] == 1.1
    assert summary([*rows, {"error": "wrong"}])["speedup_two_stages"] is None
    assert short([4, 4, 2]) == "4x2 2"
