"""osdp: for each operator of a model, the sharding that trains fastest within the memory limit.

Describe the model, profile it, price every choice, search for the best plan, run the plan::

    model = OSDP(model, model_desc, device_info)

Names are looked up when they are first used: importing the package does no work and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from osdp.api import make_pipeline_plan, make_plan, make_tensor_plan
    from osdp.device_info import DeviceInfo, HostLink, Link
    from osdp.errors import InfeasibleError, PlanMismatchError
    from osdp.integrations.group_args import gen_fsdp_args
    from osdp.model_desc import ModelDesc
    from osdp.pipeline_plan import PipelinePlan
    from osdp.plan import Mode, Plan
    from osdp.profile import Profile
    from osdp.runtime.split import split_cross_entropy, split_embedding, split_linear
    from osdp.runtime.split_modules import LMHeadLoss, SplitEmbedding, SplitLinear
    from osdp.token_slices import TokenSlices
    from osdp.training import Training
    from osdp.wrapper import OSDP, OptimalShardedDataParallel

__all__ = [
    "OSDP",
    "DeviceInfo",
    "HostLink",
    "InfeasibleError",
    "LMHeadLoss",
    "Link",
    "Mode",
    "ModelDesc",
    "OptimalShardedDataParallel",
    "PipelinePlan",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "SplitEmbedding",
    "SplitLinear",
    "TokenSlices",
    "Training",
    "gen_fsdp_args",
    "make_pipeline_plan",
    "make_plan",
    "make_tensor_plan",
    "split_cross_entropy",
    "split_embedding",
    "split_linear",
]

#: Read by setup.py, too.
__version__ = "0.1.0"

_HOME = {
    "OSDP": "osdp.wrapper",
    "OptimalShardedDataParallel": "osdp.wrapper",
    "make_plan": "osdp.api",
    "make_pipeline_plan": "osdp.api",
    "make_tensor_plan": "osdp.api",
    "gen_fsdp_args": "osdp.integrations.group_args",
    "DeviceInfo": "osdp.device_info",
    "HostLink": "osdp.device_info",
    "Link": "osdp.device_info",
    "InfeasibleError": "osdp.errors",
    "PlanMismatchError": "osdp.errors",
    "ModelDesc": "osdp.model_desc",
    "Mode": "osdp.plan",
    "Plan": "osdp.plan",
    "PipelinePlan": "osdp.pipeline_plan",
    "Profile": "osdp.profile",
    "TokenSlices": "osdp.token_slices",
    "Training": "osdp.training",
    "LMHeadLoss": "osdp.runtime.split_modules",
    "SplitEmbedding": "osdp.runtime.split_modules",
    "SplitLinear": "osdp.runtime.split_modules",
    "split_cross_entropy": "osdp.runtime.split",
    "split_embedding": "osdp.runtime.split",
    "split_linear": "osdp.runtime.split",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'osdp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
