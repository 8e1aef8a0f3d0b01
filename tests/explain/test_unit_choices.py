"""Each alternative is what the judge says of the plan with that choice alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from osdp import Plan, what_if
from osdp.cost.evaluate import evaluate
from osdp.explain.collect import collect
from osdp.plan.sharding import Mode
from osdp.report.explanation_table import explanation_table
from osdp.report.html.page import html_page
from osdp.text import format_bytes


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_alternative_costs_what_the_plan_with_it_costs(planned: Callable[..., Plan], name: str) -> None:
    plan = planned(name, slices=(), recompute=False)
    basis = plan.basis
    assert basis is not None
    explanation = plan.explain()
    assert len(explanation.units) == len(plan.units)
    checked = 0
    for index, (unit, told) in enumerate(zip(plan.units, explanation.units, strict=True)):
        for other in told.alternatives:
            if other.choice not in set(Mode) or unit.root or other.choice == Mode.HYBRID_SHARD:
                continue
            mode = Mode(other.choice)
            units = list(plan.units)
            units[index] = replace(unit, mode=mode)
            decisions = tuple(
                replace(each, mode=mode) if each.operator in unit.operators else each
                for each in plan.decisions
            )
            changed = plan.with_sharding(units=tuple(units), decisions=decisions)
            judged = evaluate(changed, basis.profiles[0], basis.device, plan.training, basis.model_desc)
            assert other.step_seconds == pytest.approx(judged.step_seconds, rel=1e-9)
            assert other.peak_bytes == judged.peak_bytes
            assert other.fits == (judged.peak_bytes <= plan.memory_limit)
            checked += 1
    assert checked > len(plan.units) / 2


def test_only_units_that_were_asked_for(planned: Callable[..., Plan]) -> None:
    plan = planned()
    block = plan.explain("transformer.h.1")
    assert 0 < len(block.units) < len(plan.units)
    assert all(any("h.1" in name for name in unit.operators) for unit in block.units)
    with pytest.raises(ValueError, match="no unit of the plan contains 'attention'; its operators are"):
        plan.explain("attention")


def test_a_faster_choice_that_does_not_fit_names_the_limit_it_needs(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=0.45)
    explanation = plan.explain()
    refused = [other for unit in explanation.units for other in unit.alternatives if not other.fits]
    faster = [other for other in refused if other.step_seconds < explanation.step_seconds]
    assert faster
    assert all(other.chosen_if[0].startswith("a limit of ") for other in faster)


def test_a_faster_choice_that_fits_is_a_tie_and_a_limit_is_one_that_can_be_told_apart(
    planned: Callable[..., Plan],
) -> None:
    """Nothing was said of choices 12 us faster, and "a limit below" of the peak that was shown for both."""
    plan = planned(fraction=1.5, slices=(), recompute=False)
    sharded = plan.with_sharding(
        units=tuple(replace(each, mode=Mode.FULL_SHARD) for each in plan.units),
        decisions=tuple(replace(each, mode=Mode.FULL_SHARD) for each in plan.decisions),
    )
    for spread, words in ((0.0, "faster, which the search did not consider or find"), (1.0, "a tie")):
        explanation = replace(sharded, predicted=replace(sharded.predicted, spread=spread)).explain()
        others = [other for unit in explanation.units for other in unit.alternatives if other.fits]
        faster = [other for other in others if other.step_seconds < explanation.step_seconds]
        assert faster and all(other.faster == words for other in faster)
        assert all(other.note.startswith(words) for other in faster)
        assert not any(other.faster for other in others if other not in faster)
        for other in others:
            if format_bytes(other.peak_bytes) == format_bytes(explanation.peak_bytes):
                assert not any(each.startswith("a limit") for each in other.chosen_if)


def test_the_table_has_no_line_beyond_110_columns(planned: Callable[..., Plan]) -> None:
    for fraction in (0.4, 0.7, 1.0):
        text = explanation_table(planned(fraction=fraction).explain())
        assert max(map(len, text.splitlines())) <= 110


def test_a_plan_without_its_basis_says_how_to_get_one(planned: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError, match="does not contain what it was searched from"):
        replace(planned(), basis=None).explain()


def test_what_limits_a_plan_is_what_would_make_it_faster(planned: Callable[..., Plan]) -> None:
    """A page said "compute", which took most of the step, of a plan whose compute only hid a slow network."""
    plan = planned(slices=(), recompute=False)
    basis, explanation = plan.basis, plan.explain()
    assert basis is not None
    halved = tuple(
        replace(link, latency=link.latency / 2, bandwidth=2 * link.bandwidth) for link in basis.device.links
    )
    device = replace(basis.device, links=halved)
    judged = evaluate(plan, basis.profiles[0], device, plan.training, basis.model_desc)
    assert explanation.links_gain == pytest.approx(explanation.step_seconds / judged.step_seconds - 1)
    # Twice as fast at everything but the optimizer's step and what a collective takes of compute.
    both = explanation.links_gain + explanation.compute_gain
    assert 0 < explanation.compute_gain < both < 2.1
    slow = what_if(plan, bandwidth=1e6).explain()
    assert slow.links_gain > 0.5 > 0.1 > slow.compute_gain
    page = html_page(collect(what_if(plan, bandwidth=1e6), seconds=0.0))
    assert "<b>communication</b>if it were twice as fast" in page


def test_a_part_of_a_recomputed_block_tells_what_sharding_all_of_it_would_cost(
    planned: Callable[..., Plan],
) -> None:
    """FSDP2 shards a recomputed block as a whole: parts of a replicated one had nothing beside them."""
    plan = planned(fraction=0.45, slices=())
    at, whole = next(
        (at, unit)
        for at, unit in enumerate(plan.units)
        if unit.mode.sharded and unit.modules[0] in plan.sharding.recomputed
    )
    parts = [
        replace(whole, operators=(name,), modules=(name,), mode=Mode.NO_SHARD) for name in whole.operators
    ]
    apart = plan.with_sharding(
        units=(*plan.units[:at], *parts, *plan.units[at + 1 :]),
        decisions=tuple(
            replace(each, mode=Mode.NO_SHARD) if each.operator in whole.operators else each
            for each in plan.decisions
        ),
    )
    told = apart.explain(whole.operators[-1])
    (back,) = [o for o in told.units[0].alternatives if o.choice == f"{whole.mode} of the whole block"]
    assert back.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert back.peak_bytes == plan.predicted.peak_bytes


def on_slow_host(plan: Plan) -> Plan:
    """A plan as of an accelerator whose host takes 0.1 s to issue each segment's forward."""
    assert plan.basis is not None
    profiles = tuple(
        replace(
            profile,
            segments=tuple(
                replace(each, forward=replace(each.forward, host_seconds=0.1)) for each in profile.segments
            ),
        )
        for profile in plan.basis.profiles
    )
    basis = replace(plan.basis, profiles=profiles, device=replace(plan.basis.device, blocking=False))
    return replace(plan, basis=basis)


def test_a_host_that_issues_too_slowly_is_told(planned: Callable[..., Plan]) -> None:
    """Of a step that the host holds up, all that was not compute was waiting for communication."""
    limits = on_slow_host(planned(fraction=20.0, slices=(), recompute=False)).explain().limits
    assert limits.startswith("the host, which issues kernels: if it were twice as fast")
    assert "waiting for communication and the host" in limits


def test_the_page_names_the_host_as_the_explanation_does(planned: Callable[..., Plan]) -> None:
    """Its first screen said that all of it was communication, and that the optimizer limits the step."""
    plan = planned(fraction=20.0, slices=(), recompute=False)
    assert plan.explain().host_gain is None
    slow = what_if(on_slow_host(plan), memory_limit=plan.memory_limit)
    page = html_page(collect(slow, seconds=0.0))
    assert "<b>the host, which issues kernels</b>if it were twice as fast" in page
    assert "waiting for communication and the host" in page
