"""The user's optimizers, which the wrapper never receives: hooks of ``torch.optim`` find them.

Start at :class:`osdp.runtime.optimizer.check.OptimizerCheck`.

- ``check``: whether the optimizer does what model and plan need
- ``closures``: closures that optimizers are given
- ``local_steps``: steps made on the local tensors of DTensors, in place of the optimizer's own
- ``whole_matrices``: Muon's, whose matrices ranks own
"""
