"""The contest: what OSDP is compared with at every memory limit.

- ``design``: which rows are measured
- ``rivals``: what an expert would train with instead
- ``greedy``: the choice of modes that takes the cheapest byte first
"""
