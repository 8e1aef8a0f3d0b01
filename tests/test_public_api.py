"""The public names are few, found where they are said to be, and cost nothing until they are used."""

import subprocess
import sys
from pathlib import Path

import pytest

import osdp
from tests.helpers.load import slowdown


def test_the_public_names_are_these() -> None:
    assert osdp.__all__ == [
        "OSDP",
        "BatchMix",
        "DeviceInfo",
        "HostLink",
        "InfeasibleError",
        "LMHeadLoss",
        "Link",
        "Mode",
        "ModelDesc",
        "OptimalShardedDataParallel",
        "Plan",
        "PlanMismatchError",
        "Profile",
        "SplitEmbedding",
        "SplitLinear",
        "TokenSlices",
        "Training",
        "diff",
        "gen_fsdp_args",
        "make_plan",
        "make_tensor_plan",
        "split_cross_entropy",
        "split_embedding",
        "split_linear",
        "what_if",
    ]


@pytest.mark.parametrize("name", osdp.__all__)
def test_a_public_name_can_be_imported_and_listed(name: str) -> None:
    assert callable(getattr(osdp, name))
    assert name in dir(osdp)


def test_both_names_of_the_wrapper_are_one_class() -> None:
    assert osdp.OSDP is osdp.OptimalShardedDataParallel


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'osdp' has no attribute 'FSDP'"):
        osdp.FSDP  # noqa: B018


def test_importing_the_package_or_its_values_does_not_import_torch() -> None:
    values = "from osdp import DeviceInfo, InfeasibleError, Mode, ModelDesc, Plan, Training"
    code = f"import sys, osdp; {values}; print(sorted({{'torch', 'numpy', 'networkx'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60 * slowdown(), check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_version_is_written_once() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120 * slowdown(),
        check=True,
    )
    assert done.stdout.split()[-1] == osdp.__version__
