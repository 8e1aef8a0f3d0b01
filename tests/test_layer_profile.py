"""Measured times of layers: interpolated, carried to other batches and degrees, saved, made from profiles."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.cluster_plan import Layout, Slot
from osdp.cost.cluster_stage import ClusterPrices
from osdp.layer_profile import LayerProfile, LayerTime, layer_profile, merged
from osdp.layout import Degrees
from osdp.model_desc import ModelDesc
from osdp.profile import Profile
from osdp.transformer import Item
from tests.clusters import FAST, SLOW, cluster, node_type, workload
from tests.test_cli import run

MEASURED = LayerProfile(
    "fast",
    "small",
    (LayerTime(Item.LAYER, 2, 1, 0.2, 0.4), LayerTime(Item.LAYER, 8, 1, 0.5, 1.0)),
)
BOTH = cluster((node_type(FAST, 4), 1), (node_type(SLOW, 4), 1))


def layer_seconds(samples: int, tp: int = 1, gpu: int = 0, profile: LayerProfile = MEASURED) -> float:
    prices = ClusterPrices(BOTH, workload(global_batch=64), profiles=[profile])
    layout = Layout(Degrees(2, 4 // tp, tp), samples, 4)
    slot = Slot((1, 0) if gpu == 0 else (0, 1))
    return prices.item_prices(layout, slot)[Item.LAYER].compute


def test_measured_points_are_taken_as_they_are_and_between_them_lines() -> None:
    assert layer_seconds(2) == pytest.approx(0.6)
    assert layer_seconds(8) == pytest.approx(1.5)
    assert 0.6 < layer_seconds(4) < 1.5


def test_beyond_them_the_model_says_how_times_grow() -> None:
    nothing = LayerProfile("fast", "small", ())
    grown = layer_seconds(16, profile=nothing) / layer_seconds(8, profile=nothing)
    assert layer_seconds(16) == pytest.approx(1.5 * grown, rel=0.05)
    halved = layer_seconds(8, tp=2, profile=nothing) / layer_seconds(8, profile=nothing)
    assert layer_seconds(8, tp=2) == pytest.approx(1.5 * halved, rel=0.05)


def test_other_devices_and_models_are_not_touched() -> None:
    nothing = LayerProfile("fast", "small", ())
    assert layer_seconds(2, gpu=1) == layer_seconds(2, gpu=1, profile=nothing)
    other = LayerProfile("fast", "another", MEASURED.times)
    assert layer_seconds(2, profile=other) == layer_seconds(2, profile=nothing)


@settings(deadline=None)
@given(samples=st.integers(1, 20), tp=st.integers(1, 8))
def test_weights_add_up_and_points_lie_around(samples: int, tp: int) -> None:
    points = MEASURED.around(Item.LAYER, samples, tp)
    assert sum(weight for _, weight in points) == pytest.approx(1.0)
    if 2 <= samples <= 8:
        assert sum(weight * time.samples for time, weight in points) == pytest.approx(samples)
    assert MEASURED.around(Item.HEAD, samples, tp) == ()


def test_profiles_are_saved_merged_and_checked(tmp_path: Path) -> None:
    MEASURED.save(tmp_path / "layers.json")
    assert LayerProfile.load(tmp_path / "layers.json") == MEASURED
    more = LayerProfile("fast", "small", (LayerTime(Item.HEAD, 2, 1, 0.1, 0.1),))
    assert merged([MEASURED, more]).times == (*MEASURED.times, *more.times)
    with pytest.raises(ValueError, match="these are of small on fast, small on slow"):
        merged([MEASURED, LayerProfile("slow", "small", ())])
    with pytest.raises(ValueError, match="measured several times"):
        merged([MEASURED, MEASURED])
    with pytest.raises(ValueError, match="no negative seconds"):
        LayerTime(Item.LAYER, 1, 1, -1.0, 0.0)


def test_what_osdp_profile_measured_becomes_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = ("n_layer=3", "n_embd=16", "n_head=2", "vocab_size=32")
    small = [text for field in fields for text in ("--set", field)]
    folder, out = tmp_path / "described", tmp_path / "layers.json"
    run("profile", "gpt2", "--batch", "2", "--seq", "8", *small, "--out", str(folder))
    run("layers", str(folder), "--gpu", "A10", "--model", "gpt2", "--out", str(out))
    assert "gpt2 on A10: layers at batches of 2" in capsys.readouterr().out
    found = LayerProfile.load(out)
    assert [time.item for time in found.times] == [Item.EMBEDDING, Item.LAYER, Item.HEAD]
    desc, profile = ModelDesc.load(folder / "model_desc.json"), Profile.load(folder / "profile.json")
    whole = sum(
        profile.by_signature[s.signature].forward.seconds + profile.by_signature[s.signature].backward.seconds
        for s in desc.segments
    )
    counts = {Item.EMBEDDING: 1, Item.LAYER: 3, Item.HEAD: 1}
    assert sum(counts[t.item] * (t.forward + t.backward) for t in found.times) == pytest.approx(whole)
    assert layer_profile(desc, profile, "A10", "gpt2") == found
