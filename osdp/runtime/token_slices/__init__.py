"""Slices of a microbatch along its sequences.

Start at :class:`osdp.runtime.token_slices.slicing.TokenSlicing`.

- ``slicing``: inputs and targets of some tokens of each sequence
- ``kv_prefix``: keys and values that a slice leaves to those after it
"""
