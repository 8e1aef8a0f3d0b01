"""osdp: for each operator of a model, the sharding that trains fastest within the memory limit.

Describe the model, profile it, price every choice, search for the best plan, run the plan::

    model = OSDP(model, model_desc, device_info)

Names are looked up when they are first used: importing the package does no work and does not import torch.

Modules in reading order; start at ``wrapper`` and ``api``:

- ``wrapper``: ``OSDP``, the module that stands where ``FSDP(model)`` stood
- ``resolve``: from the options of ``OSDP`` to a model that runs
- ``stepped``: what a wrapped model does in whole steps: train, evaluate, predict, generate
- ``api``: ``make_plan`` and ``make_tensor_plan``: describe, profile, search
- ``options``: ``PlanOptions``, the keyword options of ``OSDP`` and ``make_plan``, and what they allow
- ``inputs``: what callers pass, as the values that planning takes
- ``model``: what is trained
- ``hardware``: what devices and links can do
- ``plan``: what was decided
- ``torch_private``: what the library takes from torch that torch does not promise to keep
- ``comm``: process groups and collectives
- ``nn``: operators in slices
- ``tracing``: a module to values about it
- ``profiler``: devices, links and models, measured
- ``cost``: what a plan costs
- ``search``: which plan is best
- ``explain``: why a plan is as it is, and what another setting would bring
- ``refine``: a plan refined while it trains
- ``runtime``: runs a plan
- ``cluster``: the planner before there is a cluster
- ``report``: tables and graphs
- ``integrations``: other libraries
- ``cli``: the ``osdp`` command
- ``errors``: exceptions that carry facts
- ``codec``: values in JSON files, and safe reading of files that others may have written
- ``allocator``: freed memory of CPUs is kept for the next step
- ``text``: bytes, seconds and counts as text
- ``arrays``: types of arrays of numbers
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from osdp.api import make_plan, make_tensor_plan
    from osdp.errors import InfeasibleError, PlanMismatchError
    from osdp.explain.difference import diff
    from osdp.explain.what_if import what_if
    from osdp.hardware.device_info import DeviceInfo, HostLink, Link
    from osdp.hardware.profile import Profile
    from osdp.integrations.paper_options import gen_fsdp_args
    from osdp.model.description import ModelDesc
    from osdp.model.training import Training
    from osdp.nn.functional import split_cross_entropy, split_embedding, split_linear
    from osdp.nn.modules import LMHeadLoss, SplitEmbedding, SplitLinear
    from osdp.plan.plan import Plan
    from osdp.plan.sharding import Mode
    from osdp.plan.token_slices import TokenSlices
    from osdp.tracing.sample_batch import BatchMix
    from osdp.wrapper import OSDP, OptimalShardedDataParallel

__all__ = [
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

#: Read by setup.py, too.
__version__ = "0.1.0"

_HOME = {
    "OSDP": "osdp.wrapper",
    "OptimalShardedDataParallel": "osdp.wrapper",
    "make_plan": "osdp.api",
    "make_tensor_plan": "osdp.api",
    "diff": "osdp.explain.difference",
    "what_if": "osdp.explain.what_if",
    "gen_fsdp_args": "osdp.integrations.paper_options",
    "BatchMix": "osdp.tracing.sample_batch",
    "DeviceInfo": "osdp.hardware.device_info",
    "HostLink": "osdp.hardware.device_info",
    "Link": "osdp.hardware.device_info",
    "InfeasibleError": "osdp.errors",
    "PlanMismatchError": "osdp.errors",
    "ModelDesc": "osdp.model.description",
    "Mode": "osdp.plan.sharding",
    "Plan": "osdp.plan.plan",
    "Profile": "osdp.hardware.profile",
    "TokenSlices": "osdp.plan.token_slices",
    "Training": "osdp.model.training",
    "LMHeadLoss": "osdp.nn.modules",
    "SplitEmbedding": "osdp.nn.modules",
    "SplitLinear": "osdp.nn.modules",
    "split_cross_entropy": "osdp.nn.functional",
    "split_embedding": "osdp.nn.functional",
    "split_linear": "osdp.nn.functional",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'osdp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
