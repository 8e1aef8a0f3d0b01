"""The latency model of slices: fits find what made the samples, and the first slice pays for no context."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp import codec
from osdp.cost.token_slices.latency_fit import fit, pass_seconds
from osdp.hardware.token_latency import BatchLatency, PassLatency, SliceSample, TokenLatency, TokenSamples

LENGTHS = (1, 8, 16, 32, 64)
COEFFICIENT = st.floats(0, 1e-3)


def measured(batch: int, forward: PassLatency, backward: PassLatency) -> list[SliceSample]:
    """Samples that such passes would give."""
    places = [(i, 0) for i in forward.lengths] + [(i, j) for i in (8, 16, 32) for j in (16, 48, 96)]
    return [
        SliceSample(batch, i, j, float(pass_seconds(forward, i, j)), float(pass_seconds(backward, i, j)))
        for i, j in places
    ]


@given(
    context=st.tuples(COEFFICIENT, COEFFICIENT, COEFFICIENT, COEFFICIENT),
    alone=st.lists(st.floats(1e-3, 1.0), min_size=len(LENGTHS), max_size=len(LENGTHS)),
)
@settings(max_examples=50, deadline=None)
def test_a_fit_finds_the_model_that_made_the_samples(
    context: tuple[float, float, float, float], alone: list[float]
) -> None:
    one = PassLatency(LENGTHS, tuple(alone), context)
    two = PassLatency(LENGTHS, tuple(2 * seconds for seconds in alone), context[::-1])
    samples = TokenSamples("gpt2", "cpu", 2, 64, tuple(measured(1, one, two) + measured(3, two, one)))
    found = fit(samples)
    for batch, forward, backward in ((1, one, two), (3, two, one)):
        entry = found.of(batch)
        for fitted, true in ((entry.forward, forward), (entry.backward, backward)):
            assert fitted.lengths == true.lengths and fitted.seconds == pytest.approx(true.seconds)
            i, j = np.meshgrid(np.arange(1, 65, 3), np.arange(0, 200, 7))
            assert np.allclose(pass_seconds(fitted, i, j), pass_seconds(true, i, j), rtol=1e-6)
            assert fitted.residual < 1e-6
    assert codec.from_json(TokenLatency, codec.to_json(found)) == found


def test_the_first_slice_has_no_context_to_pay_for() -> None:
    # TeraPipe's own code adds the fit to slices without context, too.
    latency = PassLatency((8, 16), (1.0, 2.0), (10.0, 1.0, 0.0, 0.0))
    assert pass_seconds(latency, [8, 16], 0).tolist() == [1.0, 2.0]
    assert pass_seconds(latency, 8, 1) == 1.0 + 10.0 + 8.0


def test_between_lengths_is_linear_and_beyond_them_unknown() -> None:
    latency = PassLatency((8, 16), (1.0, 2.0), (-5.0, 0.0, 0.0, 0.0))
    assert pass_seconds(latency, [1, 8, 12, 16, 17], 0).tolist() == [1.0, 1.0, 1.5, 2.0, np.inf]
    # What context adds is never negative.
    assert pass_seconds(latency, 8, 100) == 1.0


def test_residuals_say_how_far_the_model_is_off() -> None:
    true = PassLatency(LENGTHS, (1.0, 2.0, 3.0, 4.0, 5.0), (0.0, 0.1, 0.1, 0.001))
    samples = measured(1, true, true)
    last = samples[-1]
    samples[-1] = replace(last, forward_seconds=last.forward_seconds * 1.5)
    entry = fit(TokenSamples("gpt2", "cpu", 1, 64, tuple(samples))).of(1)
    assert entry.forward.residual > 0.05 and 0 < entry.forward.mean_residual < entry.forward.residual
    assert entry.backward.residual < 1e-9


def test_too_few_samples_are_refused_with_what_is_missing() -> None:
    def samples(*places: tuple[int, int]) -> TokenSamples:
        return TokenSamples("gpt2", "cpu", 1, 64, tuple(SliceSample(2, i, j, 1.0, 2.0) for i, j in places))

    with pytest.raises(ValueError, match="no slice of 2 sequences was measured without context"):
        fit(samples((8, 8)))
    with pytest.raises(ValueError, match="2 slices with context do not determine"):
        fit(samples((8, 0), (8, 8), (8, 16)))
    with pytest.raises(ValueError, match="slices of 16 tokens were measured with context but only up to 8"):
        fit(samples((8, 0), (16, 8)))
    assert fit(samples((8, 0))).of(2).forward.context == (0.0, 0.0, 0.0, 0.0)


def test_values_are_checked() -> None:
    with pytest.raises(ValueError, match="2 lengths have 1 times"):
        PassLatency((8, 16), (1.0,))
    with pytest.raises(ValueError, match=r"ascending, got \[16, 8\]"):
        PassLatency((16, 8), (1.0, 2.0))
    with pytest.raises(ValueError, match="negative"):
        PassLatency((8,), (-1.0,))
    entry = BatchLatency(2, PassLatency((8,), (1.0,)), PassLatency((8,), (1.0,)))
    with pytest.raises(ValueError, match="of 4 sequences at a time was not measured, only that of 2"):
        TokenLatency("gpt2", "cpu", 1, 64, (entry,)).of(4)
