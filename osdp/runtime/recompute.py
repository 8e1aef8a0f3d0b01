"""Modules whose activations are not kept but computed again in backward.

torch's composable ``checkpoint`` does it with hooks: non-reentrant, with the random numbers of the first
time, and without a change of names. It comes before ``fully_shard``, whose hooks then see the recomputation
as the forward it is.
"""

import logging

from torch import nn

from osdp.plan import Plan

logger = logging.getLogger(__name__)


def recompute(model: nn.Module, plan: Plan) -> None:
    """Recompute the modules that ``plan`` names."""
    from torch.distributed._composable.checkpoint_activation import checkpoint

    for fqn in plan.recomputed:
        checkpoint(model.get_submodule(fqn))
    config = getattr(model, "config", None)
    if plan.recomputed and config is not None and getattr(config, "use_cache", False):
        # A cache of keys and values would be filled again by the recomputation.
        logger.warning("use_cache=True does not go with recomputation; it is set to False")
        config.use_cache = False
