"""The options are declared once; whoever takes them says the same of them, and refuses others alike."""

import inspect
import textwrap
from pathlib import Path

import pytest
import torch
from mypy import api as mypy
from torch import nn

from osdp import OSDP, DeviceInfo, Link, ModelDesc, make_plan
from osdp.hardware.device_info import COLLECTIVES
from osdp.options import PlanOptions, complete, declared, defaults
from osdp.plan.plan import PROVEN_WITHIN
from osdp.plan.search_options import SLICES
from osdp.profiler.measure import profile_model

NET = nn.Linear(4, 4)
TAKERS = (OSDP, make_plan)


def devices(memory_limit: int = 2**30) -> DeviceInfo:
    links = tuple(Link(name, "world", 2, 1e-4, 1e9) for name in COLLECTIVES)
    return DeviceInfo(
        memory_limit=memory_limit, devices_per_node=2, links=links, flops=1e9, memory_bandwidth=1e9
    )


def named(text: str) -> list[str]:
    """What is described one level below the line ``**options`` of a docstring."""
    lines = inspect.cleandoc(text).splitlines()
    start = next(index for index, line in enumerate(lines) if line.lstrip().startswith("**options:"))
    indent = len(lines[start]) - len(lines[start].lstrip()) + 4
    section = lines[start + 1 : lines.index("", start)]
    return [line.split(":")[0].strip() for line in section if line[indent] != " "]


@pytest.mark.parametrize("taker", TAKERS)
def test_help_describes_every_option_that_is_taken(taker) -> None:
    assert named(taker.__doc__) == list(declared())
    assert inspect.signature(taker).parameters["options"].kind is inspect.Parameter.VAR_KEYWORD


def test_every_option_is_described_by_the_one_that_declares_it() -> None:
    listed = [line for line in (PlanOptions.__doc__ or "").splitlines() if line.startswith(" " * 8)]
    heads = [line.split(":")[0].strip() for line in listed if line[8] != " "]
    assert heads == list(PlanOptions.__annotations__)


def test_help_of_the_wrapper_shows_what_is_passed_and_not_what_its_maker_forwards() -> None:
    parameters = inspect.signature(OSDP).parameters
    assert list(parameters)[:3] == ["model", "model_desc", "device_info"]
    assert list(parameters)[3:] == [
        "training",
        "plan",
        "mesh",
        "loss_fn",
        "find_unused_parameters",
        "options",
    ]


def test_a_wrong_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"OSDP has no option 'stratgy' \(did you mean 'strategy'\?\)\. "):
        OSDP(NET, None, "8GiB", stratgy="FULL_SHARD")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"make_plan has no option 'trainig' \(did you mean 'training'\?\)"):
        make_plan(NET, None, trainig=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"make_plan has no option 'shedule' \(did you mean 'sched"):
        make_plan(NET, None, shedule="1f1b")  # type: ignore[call-arg]


def test_all_wrong_names_are_refused_at_once() -> None:
    with pytest.raises(TypeError) as refused:
        OSDP(NET, None, "8GiB", strategie=1, recompute=False, zzz=2)  # type: ignore[call-arg]
    text = str(refused.value)
    assert "no options 'strategie' (did you mean 'strategy'?), 'zzz'. There are model, " in text
    assert text.endswith(", ".join(declared()))


def test_options_that_do_not_go_together_are_refused_before_anything_is_measured() -> None:
    for options, message in (
        (
            {"schedule": "1f1b"},
            "schedule= orders the stages of a pipeline, of which there is one: pass pp=, too",
        ),
        ({"mode": "1f1b", "dp": 2}, "schedule= orders the stages of a pipeline"),
        ({"sequence_parallel": True}, "among tensor-parallel ranks: pass tp=, too"),
        ({"sequence_parallel": True, "pp": 2, "dp": 1}, "among tensor-parallel ranks: pass tp=, too"),
        ({"double_backward": True, "pp": 2, "dp": 1}, "double_backward does not go with stages"),
        ({"pp": 2}, "without a process group both pp= and dp= must be given"),
        ({"tp": 2, "dp": 2}, "without a process group both pp= and dp= must be given"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan(NET, None, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cut, and layers sharded, as the model itself runs: pass the model"):
        make_plan(None, None, pp=2, dp=1)
    with pytest.raises(TypeError, match="make_plan has no option 'find_unused_parameters'"):
        make_plan(NET, None, find_unused_parameters=False)  # type: ignore[call-arg]


def test_defaults_are_the_same_for_all_and_say_nothing_where_they_do_not_matter() -> None:
    chosen = {name: value for name, value in defaults().items() if value is not None}
    assert chosen == {
        "sequence_parallel": False,
        "local_batches": (),
        "microbatches": (),
        "slices": SLICES,
        "recompute": True,
        "offload": True,
        "double_backward": False,
        "cache_dir": "default",
        "start": "measured",
    }
    for taker in TAKERS:
        assert complete({}, taker) == defaults()
        assert complete(PlanOptions(**defaults()), taker) == defaults()
        assert complete({"recompute": False}, taker) == {**defaults(), "recompute": False}


def test_a_plan_with_all_defaults_written_out_is_the_plan_without_them() -> None:
    device = DeviceInfo(
        memory_limit=1 << 30,
        nodes=1,
        devices_per_node=2,
        links=tuple(Link(collective, "world", 2, 1e-5, 1e9) for collective in COLLECTIVES),
        kind="GPU",
        flops=1e12,
        memory_bandwidth=1e11,
    )
    model_desc = ModelDesc.from_module(NET, torch.zeros(2, 4))
    plan = make_plan(None, model_desc, device)
    assert make_plan(None, model_desc, device, **PlanOptions(**defaults())) == plan


def test_both_names_of_the_schedule_are_one_option() -> None:
    with pytest.raises(ValueError, match="schedule='gpipe' and mode='1f1b' are two names of one option"):
        make_plan(NET, None, pp=2, dp=1, schedule="gpipe", mode="1f1b")
    with pytest.raises(ValueError, match="schedule 'fastest' is unknown"):
        make_plan(NET, torch.zeros(2, 4), pp=2, dp=1, mode="fastest")


def test_type_checkers_know_the_options_and_what_is_made(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        textwrap.dedent(
            """\
            from osdp import OSDP, make_plan
            reveal_type(OSDP(None, None, "8GiB", strategy="FULL_SHARD", recompute=False, loss_fn=print))
            OSDP(None, None, "8GiB", stratgy="FULL_SHARD")
            OSDP(None, None, "8GiB", recompute="no")
            make_plan(None, None, slises=(2,))
            make_plan(None, None, pp="2")
            """
        ),
        encoding="utf8",
    )
    config = tmp_path / "mypy.ini"
    # What the four modules import is taken as it is: to read all of torch takes half a minute.
    config.write_text(
        "[mypy]\nno_site_packages = true\nignore_missing_imports = true\nfollow_imports = skip\n"
        "[mypy-osdp,osdp.wrapper,osdp.api,osdp.options]\nfollow_imports = silent\n",
        encoding="utf8",
    )
    options = ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), "--no-error-summary"]
    found, failure, _ = mypy.run([*options, "--hide-error-context", str(snippet)])
    assert not failure
    said = [line.split(":", 1)[1] for line in found.splitlines() if '" defined in "' not in line]
    assert said == [
        '2: note: Revealed type is "osdp.wrapper.OSDP"',
        '3: error: Unexpected keyword argument "stratgy" for "OSDP"; did you mean "strategy"?  [call-arg]',
        '4: error: Argument "recompute" to "OSDP" has incompatible type "str"; expected "bool"  [arg-type]',
        '5: error: Unexpected keyword argument "slises" for "make_plan"; did you mean "slices"?  [call-arg]',
        '6: error: Argument "pp" to "make_plan" has incompatible type "str"; expected "int | None"  '
        "[arg-type]",
    ]


def test_a_global_batch_is_kept_whatever_is_chosen() -> None:
    device = devices()
    model_desc = ModelDesc.from_module(NET, torch.ones(6, 4))
    plan = make_plan(None, model_desc, device, global_batch=24)
    assert plan.global_batch == 24
    profile = profile_model(NET, model_desc, torch.ones(6, 4), progress=False)
    given = make_plan(None, model_desc, device, global_batch=24, profile=profile)
    assert (given.local_batch, given.training.microbatches) == (6, 2), "the profile's batch is the only one"
    with pytest.raises(ValueError, match=r"global_batch=25 cannot .* among dp=2 ranks; .*: 24 and 26"):
        make_plan(None, model_desc, device, global_batch=25)
    stages = make_plan(
        nn.Sequential(NET, nn.Linear(4, 4)), torch.ones(6, 4), device, pp=2, dp=2, global_batch=24
    )
    assert stages.global_batch == 24


def test_a_search_with_a_time_limit_says_what_it_leaves_unproven() -> None:
    wide = [nn.Sequential(nn.Linear(64, 64 + i), nn.Tanh(), nn.Linear(64 + i, 64)) for i in range(40)]
    desc = ModelDesc.from_module(nn.Sequential(*wide), torch.zeros(2, 64))
    low, high = (
        make_plan(None, desc, devices(), strategy=mode).predicted.peak_bytes
        for mode in ("FULL_SHARD", "NO_SHARD")
    )
    device = devices((low + high) // 2)
    plan = make_plan(None, desc, device, slices=SLICES, recompute=True, search_seconds=0.5)
    assert plan.predicted.peak_bytes <= device.memory_limit
    assert plan.optimal is not any(note.startswith(PROVEN_WITHIN) for note in plan.notes)
    # Without a limit a bounded number of rounds is made: the plan of more time is no slower.
    bounded = make_plan(None, desc, device, slices=SLICES, recompute=True)
    longer = make_plan(None, desc, device, slices=SLICES, recompute=True, search_seconds=5.0)
    assert longer.predicted.step_seconds <= bounded.predicted.step_seconds


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_a_time_limit_of_the_search_is_positive_and_finite(seconds: float) -> None:
    desc = ModelDesc.from_module(NET, torch.zeros(1, 4))
    with pytest.raises(ValueError, match="more than 0 and finite"):
        make_plan(None, desc, devices(), search_seconds=seconds)


def test_a_time_limit_of_the_search_is_none_of_stages() -> None:
    with pytest.raises(ValueError, match="without stages"):
        make_plan(
            nn.Sequential(NET, nn.Linear(4, 4)), torch.ones(6, 4), devices(), pp=2, dp=1, search_seconds=1
        )
