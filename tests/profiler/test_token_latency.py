"""Measured slices of transformers' decoders: right gradients, plausible times, and a fit that predicts
them."""

import copy

import pytest
import torch

from osdp.cost.token_slices.latency_fit import fit
from osdp.integrations.huggingface.decoder_stage import decoder_stage
from osdp.plan.token_slices import TokenSlices
from osdp.profiler import token_latency
from osdp.profiler.stopwatch import Clock
from osdp.profiler.token_latency import measure_slices, measure_token_latency, sample_places

SMALL = {
    "gpt2": {
        "n_layer": 3, "n_embd": 32, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": {
        "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "mistral": {
        "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "sliding_window": 8, "head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_what_is_timed_is_the_whole_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = decoder_stage(name, SMALL[name], num_layers=2, dtype=torch.float64)
    whole = copy.deepcopy(stage.module)
    x = torch.randn(2, 24, 32, dtype=torch.float64)
    whole(inputs_embeds=x)[0].sum().backward()
    parts = iter(x.split([11, 8, 5], dim=1))
    monkeypatch.setattr(token_latency, "_random_hidden", lambda *_: next(parts).clone())
    token_latency._run_sequence(stage, TokenSlices((11, 8, 5)), 2, Clock(torch.device("cpu")))
    wanted = dict(whole.named_parameters())
    for fqn, parameter in stage.module.named_parameters():
        if wanted[fqn].grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[fqn].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SMALL)
def test_samples_cover_the_grid_and_can_be_fitted(name: str) -> None:
    stage = decoder_stage(name, SMALL[name], num_layers=1)
    found = measure_token_latency(stage, 64, batches=(1, 2), repeats=1, progress=False)
    assert (found.device, found.num_layers, found.token_bytes) == ("cpu", 1, 32 * 4)
    places = sample_places(64, 8)
    wanted = [(batch, *place) for batch in (1, 2) for place in places]
    assert [(s.batch, s.length, s.context) for s in found.samples] == wanted
    assert all(sample.forward_seconds > 0 and sample.backward_seconds > 0 for sample in found.samples)
    assert [entry.batch for entry in fit(found).batches] == [1, 2]


def test_slices_of_a_whole_sequence_are_timed_in_their_order() -> None:
    stage = decoder_stage("gpt2", SMALL["gpt2"])
    found = measure_slices(stage, TokenSlices((8, 16, 8)), batch=2, repeats=1)
    assert [(s.batch, s.length, s.context) for s in found] == [(2, 8, 0), (2, 16, 8), (2, 8, 24)]


def test_places_fit_the_sequence() -> None:
    for length in (1, 7, 8, 100, 1024):
        places = sample_places(length, 8)
        assert (length, 0) in places and all(i + j <= length and i > 0 for i, j in places)
    assert len({i for i, j in sample_places(1024, 8) if j}) > 2


def test_stages_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="a stage cannot have 4 layers of gpt2, which has 3"):
        decoder_stage("gpt2", SMALL["gpt2"], num_layers=4)
    with pytest.raises(ValueError, match="sequences of up to 1024 tokens, not 2048"):
        decoder_stage("gpt2", SMALL["gpt2"], length=2048)
    with pytest.raises(ValueError, match="0 repeats"):
        measure_token_latency(decoder_stage("gpt2", SMALL["gpt2"]), 64, repeats=0)
