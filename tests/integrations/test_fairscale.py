"""fairscale's ``wrap`` and ``auto_wrap`` mark; torch's and fairscale's policies say what they would wrap."""

import copy
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fairscale.nn.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap, wrap
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from osdp import OSDP
from osdp.integrations.auto_wrap import policy_atoms
from osdp.integrations.fairscale import marked_modules, with_marked_options
from osdp.options import defaults
from osdp.plan.search_options import SLICES
from osdp.plan.sharding import Mode
from tests.helpers.distributed import run
from tests.helpers.load import slowdown
from tests.helpers.nets import Block, Net, tokens
from tests.helpers.plans import plan_by_hand

BLOCKS = ("blocks.0", "blocks.1")


def by_size(numel: int) -> object:
    return functools.partial(default_auto_wrap_policy, min_num_params=numel)


class Marking(nn.Module):
    """A model whose author wrapped a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = wrap(nn.Linear(3, 4))
        self.second = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_wrap_marks_inside_the_context_only() -> None:
    assert marked_modules(Marking()) == ()
    with enable_wrap(wrapper_cls=OSDP):
        net = Marking()
    assert type(net.first) is nn.Linear
    assert marked_modules(net) == ("first",)
    assert list(net.state_dict()) == list(Marking().state_dict())


def test_auto_wrap_marks_what_the_policy_chooses() -> None:
    with enable_wrap(wrapper_cls=OSDP, auto_wrap_policy=by_size(60)):
        net = auto_wrap(Net(gated=False))
    assert marked_modules(net) == ("embed", *BLOCKS, "head")
    assert all(type(block) is Block for block in net.blocks)


def test_a_marked_model_without_a_root_says_what_to_add() -> None:
    with enable_wrap(wrapper_cls=OSDP):
        net = Marking()
    for model in (net, copy.deepcopy(net)):
        with pytest.raises(RuntimeError, match=r"model = OSDP\(model, sample_batch, memory_limit\)"):
            model(torch.ones(1, 3))


def test_options_of_the_context_are_defaults_of_the_root() -> None:
    with enable_wrap(wrapper_cls=OSDP, device_info="8GiB", find_unused_parameters=False):
        net = Marking()
    given = {"device_info": None, "find_unused_parameters": True, "strategy": "FULL_SHARD"}
    merged = with_marked_options(net, given, defaults() | {"find_unused_parameters": True})
    assert merged == {"device_info": "8GiB", "find_unused_parameters": False, "strategy": "FULL_SHARD"}
    assert with_marked_options(net, {**given, "device_info": "1GiB"}, defaults())["device_info"] == "1GiB"
    with pytest.raises(TypeError, match=r"OSDP has no option 'flatten_parameter' \(did you mean 'flat"):
        with enable_wrap(wrapper_cls=OSDP, flatten_parameter=True):
            Marking()


def test_marks_turn_off_what_the_root_leaves_on_and_not_the_other_way_round() -> None:
    with enable_wrap(wrapper_cls=OSDP, recompute=False, slices=[]):
        net = Marking()
    left = {"recompute": True, "slices": SLICES, "offload": True}
    assert with_marked_options(net, left, defaults()) == {**left, "recompute": False, "slices": []}
    with enable_wrap(wrapper_cls=OSDP, recompute=True):
        other = Marking()
    assert with_marked_options(other, {"recompute": False}, defaults()) == {"recompute": False}


def test_marks_that_disagree_are_refused() -> None:
    with enable_wrap(wrapper_cls=OSDP):
        net = nn.Sequential(
            wrap(nn.Linear(1, 1), device_info="1GiB"), wrap(nn.Linear(1, 1), device_info="2GiB")
        )
    with pytest.raises(ValueError, match=r"1 is marked with device_info='2GiB', others with '1GiB'"):
        with_marked_options(net, {"device_info": None}, defaults())


def root_runs() -> None:
    with enable_wrap(wrapper_cls=OSDP, auto_wrap_policy=by_size(60)):
        net = auto_wrap(Net(gated=False))
    model = OSDP(net, plan=plan_by_hand(net, Mode.NO_SHARD, dist.get_world_size()))
    assert model(tokens(0, 2, 6)).shape == (2, 6, 13)
    assert marked_modules(model.module) == ()


def test_the_root_takes_the_marks_away() -> None:
    run(2, root_runs)


def test_policies_of_torch_and_fairscale() -> None:
    net = Net(gated=False)
    assert policy_atoms(net, ModuleWrapPolicy({Block})) == BLOCKS
    assert policy_atoms(net, CustomPolicy(lambda module: isinstance(module, Block))) == BLOCKS
    transformer = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    assert policy_atoms(net, transformer) == BLOCKS
    chosen = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Embedding))
    assert policy_atoms(net, chosen) == ("embed",)
    sized = functools.partial(size_based_auto_wrap_policy, min_num_params=60)
    assert policy_atoms(net, sized) == ("embed", *BLOCKS, "head")
    assert policy_atoms(net, by_size(60)) == ("embed", *BLOCKS, "head")
    assert policy_atoms(net, by_size(10**6)) == ()
    with pytest.raises(TypeError, match="int"):
        policy_atoms(net, 3)
    # Dropped, without a word.
    apart = CustomPolicy(lambda module: {"sharding_strategy": "NO_SHARD"} if module is net.head else False)
    with pytest.raises(ValueError, match="sets sharding_strategy for single modules"):
        policy_atoms(net, apart)


def test_without_fairscale_models_are_wrapped_all_the_same(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
sys.modules["fairscale"] = None
import torch
import torch.distributed as dist
from torch import nn
from osdp import OSDP, DeviceInfo, ModelDesc, make_plan
store = dist.FileStore({str(tmp_path / "store")!r}, 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
batch = torch.ones(2, 4)
desc = ModelDesc.from_module(nn.Linear(4, 4), batch)
devices = DeviceInfo(memory_limit=2**26, flops=1e9, memory_bandwidth=1e9)
plan = make_plan(None, desc, devices)
model = OSDP(nn.Linear(4, 4), desc, devices, plan=plan)
model(batch).sum().backward()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120 * slowdown(), check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_osdp_does_not_import_fairscale() -> None:
    code = "import sys, osdp, osdp.wrapper; sys.exit('fairscale' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60 * slowdown(), check=False).returncode == 0
