"""Every value survives JSON, and JSON that is no value is refused with the place named."""

import dataclasses
import json
import os
import socket
import types
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp import codec
from osdp.hardware.device_info import COLLECTIVES, DeviceInfo, Link
from osdp.hardware.profile import OptimizerProfile, Profile
from osdp.model.description import DTYPE_BYTES, ModelDesc
from osdp.model.training import OPTIMIZERS, Training
from osdp.plan.basis import Basis
from osdp.plan.plan import PLAN_VERSION, Plan, StagePlan
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import UNGROUPED, Decision, Mode, ShardingPlan, Unit
from osdp.plan.token_slices import TokenSlices

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = {
    str: st.text(max_size=5),
    int: st.integers(-(2**70), 2**70),
    float: FINITE,
    bool: st.booleans(),
    type(None): st.none(),
}


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type."""
    origin, items = typing.get_origin(kind), typing.get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(of, items))
    if origin is tuple and items[1:] == (Ellipsis,):
        return st.lists(of(items[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of, items))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    if kind is OptimizerProfile:
        prices = st.tuples(FINITE, FINITE).map(sorted)
        return st.builds(lambda pair, per_byte: OptimizerProfile(*pair, per_byte), prices, FINITE)
    if kind is Decision:
        return DECISION
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: of(hints[field.name]) for field in dataclasses.fields(kind)})


DECISION = st.builds(
    lambda cut, mode, kept, **facts: Decision(
        **facts,
        mode=mode,
        slices=cut[0],
        sliced_by=cut[1],
        slices_kept=kept % (cut[0] + 1) if cut[1] and mode.sharded else 0,
    ),
    operator=st.text(max_size=5),
    modules=of(tuple[str, ...]),
    parameters=of(tuple[str, ...]),
    nbytes=of(int),
    mode=of(Mode),
    kept=st.integers(0, 99),
    reason=of(str),
    cut=st.one_of(st.just((1, "")), st.tuples(st.integers(2, 99), st.sampled_from(["output", "rows"]))),
)
LINK = st.builds(
    Link,
    collective=st.sampled_from(COLLECTIVES),
    group=st.sampled_from(["world", "inside 8", "across 8"]),
    size=st.integers(1, 10**6),
    latency=st.floats(0, 1e9),
    bandwidth=st.floats(1e-9, 1e18),
    residual=FINITE,
)
DEVICE = st.builds(
    DeviceInfo,
    memory_limit=st.integers(1, 2**60),
    kind=st.text(max_size=5),
    nodes=st.integers(1, 99),
    devices_per_node=st.integers(1, 9).map(lambda eighths: 16 * eighths),
    links=st.lists(LINK, max_size=3).map(tuple),
    blocking=st.booleans(),
    copies_messages=st.none() | st.booleans(),
    overlap=st.floats(0, 1),
    flops=FINITE,
    measured=st.booleans(),
)


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
    options = {name: draw(st.booleans()) for name in OPTIMIZERS[optimizer].options}
    options["nesterov"] = options.get("nesterov", False) and options["momentum"]
    fused = draw(st.sampled_from([None, False, *[True] * OPTIMIZERS[optimizer].fused]))
    dtypes = st.sampled_from([None, *DTYPE_BYTES])
    return Training(
        optimizer=optimizer,
        **options,
        fused=fused,
        foreach=draw(st.sampled_from([None, False, *[True] * (not fused)])),
        param_dtype=draw(dtypes),
        reduce_dtype=draw(dtypes),
        local_batch=draw(st.integers(1, 99)),
        microbatches=draw(st.integers(1, 99)),
    )


@st.composite
def shardings(draw: st.DrawFn) -> ShardingPlan:
    names = draw(st.lists(st.text(max_size=5), unique=True, max_size=4))
    decisions = tuple(dataclasses.replace(draw(of(Decision)), operator=name) for name in names)
    cut = draw(st.integers(0, len(names)))
    units = tuple(
        Unit(draw(st.sampled_from(UNGROUPED)), tuple(part), tuple(part))
        for part in (names[:cut], names[cut:])
    )
    hints = typing.get_type_hints(ShardingPlan)
    fields = {name: draw(of(kind)) for name, kind in hints.items() if name not in ("decisions", "units")}
    return ShardingPlan(**fields, decisions=decisions, units=units)


@st.composite
def stages(draw: st.DrawFn) -> tuple[StagePlan, ...]:
    facts = {name: kind for name, kind in typing.get_type_hints(StagePlan).items() if name != "sharding"}
    return tuple(
        StagePlan(
            **{name: draw(of(kind)) for name, kind in facts.items() if name != "modules"},
            modules=(f"stage {index}",),
            sharding=draw(shardings()),
        )
        for index in range(draw(st.integers(1, 2)))
    )


#: The smallest that there is: its parts have tests of their own.
BASIS = Basis(
    ModelDesc("Empty", (), (), 1, False, (), (), ()),
    DeviceInfo(memory_limit=1),
    (Training(local_batch=1),),
    (Profile("cpu", 1, (), OptimizerProfile(0.0, 0.0, 0.0), 0, False, ""),),
    SearchOptions(),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    given = {"training": trainings(), "stages": stages(), "pp": st.just(1), "tensor": st.none()}
    given["basis"] = st.sampled_from([None, BASIS])
    given |= {"token_slices": st.one_of(st.none(), st.builds(TokenSlices, st.just((3, 2))))}
    hints = typing.get_type_hints(Plan)
    return Plan(
        **{name: draw(given.get(name, of(hint))) for name, hint in hints.items() if name != "version"}
    )


VALUES = [
    pytest.param(DEVICE, id="DeviceInfo"),
    pytest.param(trainings(), id="Training"),
    pytest.param(plans(), id="Plan"),
    pytest.param(of(Profile), id="Profile"),
    pytest.param(of(ModelDesc), id="ModelDesc"),
]


@pytest.mark.parametrize("strategy", VALUES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_round_trip(strategy: st.SearchStrategy[Any], data: st.DataObject) -> None:
    value = data.draw(strategy)
    text = codec.to_json(value)
    again = codec.from_json(type(value), text)
    assert again == value
    assert codec.to_json(again) == text
    assert codec.fingerprint(again) == codec.fingerprint(value)


@settings(max_examples=40, deadline=None)
@given(plans(), plans())
def test_fingerprints_tell_values_apart(one: Plan, other: Plan) -> None:
    assert (codec.fingerprint(one) == codec.fingerprint(other)) == (one == other)


def test_text_is_stable_and_diffs_line_by_line() -> None:
    lines = codec.to_json(Training()).splitlines()
    keys = [line.split('"')[1] for line in lines[1:-1]]
    assert keys == sorted(keys) and len(keys) == len(dataclasses.fields(Training))


def test_defaults_may_be_left_out() -> None:
    assert codec.from_json(DeviceInfo, '{"memory_limit": 5}') == DeviceInfo(memory_limit=5)
    assert codec.from_json(DeviceInfo, '{"memory_limit": 5, "flops": 2}').flops == 2.0


LINK_JSON = '{"collective": "all_gather", "group": "world", "size": 2, "latency": 0, "bandwidth": %s}'


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not a DeviceInfo"),
        ("[]", "DeviceInfo must be an object"),
        ("{}", r"missing fields \['memory_limit'\]"),
        ('{"memory_limit": 5, "memory": 1}', r"unknown fields \['memory'\]"),
        ('{"memory_limit": "8GiB"}', "DeviceInfo.memory_limit must be a int, got '8GiB'"),
        ('{"memory_limit": true}', "must be a int, got True"),
        ('{"memory_limit": 5, "flops": true}', "must be a number, got True"),
        ('{"memory_limit": 5, "blocking": 1}', "DeviceInfo.blocking must be a bool"),
        ('{"memory_limit": 5, "links": {}}', "must be a list"),
        (f'{{"memory_limit": 5, "links": [{LINK_JSON % "null"}]}}', r"links\[0\].bandwidth must be a number"),
        (f'{{"memory_limit": 5, "links": [{LINK_JSON % "0"}]}}', "bandwidth 0.0 must be positive"),
        ('{"memory_limit": 5, "flops": NaN}', "NaN is not a JSON number"),
    ],
)
def test_what_is_no_value_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec.from_json(DeviceInfo, text)


def test_enums_name_their_members() -> None:
    decision = json.loads(codec.to_json(Decision("a", (), (), 1, Mode.FULL_SHARD)))
    with pytest.raises(ValueError, match=r"Decision.mode must be one of NO_SHARD, SHARD_OPTIMIZER, "):
        codec.from_json(Decision, json.dumps(decision | {"mode": "ZDP"}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x"])
def test_what_has_no_json_form(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        codec.to_json(value)


def test_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "training.json"
    codec.save(Training(local_batch=3), path)
    with pytest.raises(TypeError):
        codec.save(object(), path)
    assert codec.load(Training, path).local_batch == 3
    assert [child.name for child in path.parent.iterdir()] == ["training.json"]


def test_hosts_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of two containers had one number: who renamed the file second found none."""
    written: list[str] = []
    write = Path.write_text

    def noted(path: Path, *args: Any, **kwargs: Any) -> int:
        written.append(path.name)
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", noted)
    monkeypatch.setattr(os, "getpid", lambda: 17)
    for host in ("a", "b"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        codec.save(Training(), tmp_path / "training.json")
    assert len(set(written)) == 2


def test_another_version_is_named_before_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"version": 1, "optimizer": "AdamW"}')
    with pytest.raises(ValueError, match=rf"format 1 is not the supported {PLAN_VERSION}; create it again"):
        codec.load(Plan, path)
    for old in (1, 5):
        path.write_text(f'{{"version": {old}, "optimizer": "AdamW"}}')
        with pytest.raises(
            ValueError,
            match=rf"plan\.json: a plan of format {old}; .* reads format 6: create it again with osdp plan",
        ):
            Plan.load(path)


def test_errors_of_files_name_them(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(FileNotFoundError, match=r"plan\.json"):
        codec.load(Plan, path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"plan\.json: Plan: unknown fields"):
        codec.load(Plan, path)
