"""Seconds of slices of a sequence, and of steps made of them.

Start at :mod:`osdp.cost.token_slices.step`.

- ``latency_fit``: the latency model, fitted to measured slices
- ``step``: seconds of every slice on a stage, and of steps that work on slices
"""
