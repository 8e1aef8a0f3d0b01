"""Measured times of layers: interpolated, carried to other batches and degrees, saved, made from profiles."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.layer_profile import (
    LayerCase,
    LayerCost,
    LayerProfile,
    layer_profile,
    merge_profiles,
    points_around,
)
from osdp.cluster.plan import ParallelLayout, RecomputeLayers, StageSlot
from osdp.cluster.transformer import Item
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc
from osdp.plan.dims import ParallelDims
from tests.cli.test_main import run
from tests.helpers.clusters import FAST, SLOW, cluster, node_type, workload

MEASURED = LayerProfile(
    "fast",
    "small",
    512,
    "bfloat16",
    (
        LayerCost(LayerCase(Item.LAYER, 2, 256, 1), 10**8, 10**7, 0.2, 0.4),
        LayerCost(LayerCase(Item.LAYER, 8, 256, 1), 4 * 10**8, 10**7, 0.5, 1.0),
    ),
)
BOTH = cluster((node_type(FAST, 4), 1), (node_type(SLOW, 4), 1))


def layer_seconds(samples: int, tp: int = 1, gpu: int = 0, profile: LayerProfile = MEASURED) -> float:
    prices = ClusterPrices(BOTH, workload(global_batch=64), profiles=[profile])
    layout = ParallelLayout(ParallelDims(2, 4 // tp, tp), samples, 4)
    slot = StageSlot((1, 0) if gpu == 0 else (0, 1))
    return prices.item_prices(layout, slot)[Item.LAYER].compute


def test_measured_points_are_taken_as_they_are_and_between_them_lines() -> None:
    assert layer_seconds(2) == pytest.approx(0.6)
    assert layer_seconds(8) == pytest.approx(1.5)
    assert 0.6 < layer_seconds(4) < 1.5


def test_beyond_them_the_model_says_how_times_grow() -> None:
    nothing = LayerProfile("fast", "small", 512, "bfloat16", ())
    grown = layer_seconds(16, profile=nothing) / layer_seconds(8, profile=nothing)
    assert layer_seconds(16) == pytest.approx(1.5 * grown, rel=0.05)
    halved = layer_seconds(8, tp=2, profile=nothing) / layer_seconds(8, profile=nothing)
    assert layer_seconds(8, tp=2) == pytest.approx(1.5 * halved, rel=0.05)


def test_activations_are_those_that_were_measured() -> None:
    load = replace(workload(global_batch=64), fragmentation=0)
    prices = ClusterPrices(BOTH, load, profiles=[MEASURED])
    fast, slow = StageSlot((1, 0)), StageSlot((0, 1))
    layout = ParallelLayout(ParallelDims(2, 4, 1), 2, 4)
    layer = prices.item_prices(layout, fast)[Item.LAYER]
    assert (layer.kept, layer.working) == (10**8, 10**7)
    modelled = prices.item_prices(layout, slow)[Item.LAYER]
    assert modelled.kept == ClusterPrices(BOTH, prices.workload).item_prices(layout, fast)[Item.LAYER].kept
    # Recomputed, all but the input is there for a moment only.
    again = prices.item_prices(replace(layout, recompute=RecomputeLayers.FULL), fast)[Item.LAYER]
    assert again.kept + again.working == layer.kept + layer.working
    more = prices.item_prices(replace(layout, samples=16), fast)[Item.LAYER]
    assert more.kept == pytest.approx(8 * 10**8, rel=1e-6)


def test_other_devices_and_models_are_not_touched() -> None:
    nothing = LayerProfile("fast", "small", 512, "bfloat16", ())
    assert layer_seconds(2, gpu=1) == layer_seconds(2, gpu=1, profile=nothing)
    other = LayerProfile("fast", "another", 512, "bfloat16", MEASURED.layers)
    assert layer_seconds(2, profile=other) == layer_seconds(2, profile=nothing)


@settings(deadline=None)
@given(samples=st.integers(1, 20), tp=st.integers(1, 8))
def test_weights_add_up_and_points_lie_around(samples: int, tp: int) -> None:
    points = points_around(MEASURED.layers, LayerCase(Item.LAYER, samples, 256, tp))
    assert sum(weight for _, weight in points) == pytest.approx(1.0)
    if 2 <= samples <= 8:
        assert sum(weight * time.case.samples for time, weight in points) == pytest.approx(samples)
    assert points_around(MEASURED.layers, LayerCase(Item.HEAD, samples, 256, tp)) == ()


def test_profiles_are_saved_merged_and_checked(tmp_path: Path) -> None:
    MEASURED.save(tmp_path / "layers.json")
    assert LayerProfile.load(tmp_path / "layers.json") == MEASURED
    more = LayerProfile(
        "fast", "small", 512, "bfloat16", (LayerCost(LayerCase(Item.HEAD, 2, 256, 1), 1, 1, 0.1, 0.1),)
    )
    assert merge_profiles([MEASURED, more]).layers == (*MEASURED.layers, *more.layers)
    with pytest.raises(ValueError, match="these are of small of width 512 on fast in bfloat16, small of"):
        merge_profiles([MEASURED, LayerProfile("slow", "small", 512, "bfloat16", ())])
    with pytest.raises(ValueError, match="measured several times"):
        merge_profiles([MEASURED, MEASURED])
    with pytest.raises(ValueError, match="no negative seconds"):
        LayerCost(LayerCase(Item.LAYER, 1, 256, 1), 1, 1, -1.0, 0.0)


def test_the_nearest_length_counts_and_the_model_carries_it_on() -> None:
    longer = LayerProfile(
        "fast",
        "small",
        512,
        "bfloat16",
        (*MEASURED.layers, LayerCost(LayerCase(Item.LAYER, 2, 2**20, 1), 1, 1, 1.0, 2.0)),
    )
    ((near, _),) = points_around(longer.layers, LayerCase(Item.LAYER, 2, 2**15, 1))
    assert near.case.sequence == 2**20
    assert layer_seconds(2, profile=longer) == pytest.approx(0.6)
    # So long a sequence fills the device, which this one does not.
    far = replace(longer, layers=longer.layers[-1:])
    assert layer_seconds(2, profile=far) < 0.1


def test_what_osdp_profile_measured_becomes_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = ("n_layer=3", "n_embd=16", "n_head=2", "vocab_size=32")
    small = [text for field in fields for text in ("--set", field)]
    folder, part, out = tmp_path / "described", tmp_path / "part", tmp_path / "layers.json"
    run("profile", "gpt2", "--batch", "2", "--seq", "8", *small, "--out", str(folder))
    run("profile", "gpt2", "--batch", "2", "--seq", "8", *small, "--tp", "2", "--out", str(part))
    run("cluster", "layers", str(folder), str(part), "--gpu", "A10", "--model", "gpt2", "--out", str(out))
    told = capsys.readouterr().out
    assert "gpt2 on A10: layers in float32 at 2 x 8 on tp=1, 2 x 8 on tp=2" in told
    found = LayerProfile.load(out)
    assert [time.case.item for time in found.layers] == 2 * [Item.EMBEDDING, Item.LAYER, Item.HEAD]
    desc, profile = ModelDesc.load(folder / "model_desc.json"), Profile.load(folder / "profile.json")
    whole = sum(profile.of(s).forward.seconds + profile.of(s).backward.seconds for s in desc.segments)
    counts = {Item.EMBEDDING: 1, Item.LAYER: 3, Item.HEAD: 1}
    own = layer_profile(desc, profile, "A10", "gpt2")
    kept = sum(counts[t.case.item] * t.kept_bytes for t in own.layers)
    assert kept == pytest.approx(sum(profile.of(s).forward.live_bytes for s in desc.segments), rel=0.01)
    assert all(t.working_bytes > 0 for t in own.layers)
    assert sum(counts[t.case.item] * (t.forward + t.backward) for t in own.layers) == pytest.approx(whole)
    assert own.layers == found.layers[:3]
    with pytest.raises(RuntimeError, match="describes the part of one of 2 tensor-parallel ranks"):
        run("plan", str(part))
    with pytest.raises(ValueError, match="is an estimate, which the cluster planner makes itself"):
        layer_profile(desc, replace(profile, measured=False), "A10", "gpt2")
    cluster = tmp_path / "cluster.json"
    cluster.write_text(
        '{"nodes": [{"gpu": "A10", "count": 1, "devices": 2, "network": "40 Gbit/s"}]}', encoding="utf8"
    )
    plan = [
        "cluster", "plan", "--cluster", str(cluster), "--global-batch", "4", "--top", "1",
        "--layer-times", str(out),
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="measured in float32, the cluster planner assumes 16 bits"):
        run(*plan, "--model", str(folder))
    half = tmp_path / "half"
    run("profile", "gpt2", "--seq", "8", *small, "--param-dtype", "bfloat16", "--out", str(half))
    # A folder is named by what it describes.
    run("cluster", "layers", str(half), "--gpu", "A10", "--model", str(half), "--out", str(out))
    with pytest.raises(RuntimeError, match="layers on A10 are 16 wide, those of gpt2 768"):
        run(*plan, "--model", "gpt2")
    capsys.readouterr()
    run(*plan, "--model", str(half))
    told = capsys.readouterr().out
    assert "proven best in its space" in told and "layers measured on A10" in told
