"""Runs a plan: FSDP2 for sharded units, overlapped all-reduces for replicated ones.

Start at :func:`osdp.runtime.running.apply`. Knows plans and torch, not how plans are found.

- ``running``: ``apply``, and what every model under a plan can do
- ``stages``: what a stage computes, and what stores its parameters
- ``sharding``: a model under a sharding plan
- ``pipeline``: a model in stages
- ``tensor_parallel``: a model whose layers several ranks compute
- ``token_slices``: slices of a microbatch
- ``steps``: training, evaluation and inference steps, for whole models and stages alike
- ``switch``: going on under another plan
- ``microbatch``: a batch as arguments of a forward, and its parts
- ``computation``: how a model computes, where that is no part of the plan
- ``batch_watch``: a warning if a batch is larger than planned for
- ``uncounted_memory``: a warning if a loop holds more than plans count
- ``step_recorder``: what parts of a step take
- ``measured_steps``: what steps take, beside what was predicted
- ``losses``: losses as sums with counts
- ``clip``: clipping by the norm of all gradients
- ``recompute``: modules whose activations are recomputed in backward
- ``replay``: what a forward finds in addition to its arguments, so that a second run finds the same
- ``mesh``: the mesh of the data-parallel ranks
- ``meta_init``: real values for models built on ``meta``
- ``optimizer``: the user's optimizers
- ``module``: the user's module: its parameters, outputs, hooks and state dicts
- ``ranks``: what the ranks of a model agree on
- ``checkpoint``: saving and loading
"""

from osdp.runtime.running import RunningModel, apply
from osdp.runtime.sharding.sharded_model import ShardedModel

__all__ = ["RunningModel", "ShardedModel", "apply"]
