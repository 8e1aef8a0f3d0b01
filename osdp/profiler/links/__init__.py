"""Measures links and devices: latency and bandwidth of collectives and messages.

Start at :func:`osdp.profiler.links.detect.detect`.

- ``detect``: FSDP2's collectives on the live process group
- ``fitting``: their latency and bandwidth, from timed units
- ``estimated``: the same at a glance, to begin to train with
- ``fsdp_probe``: the units they are measured with
- ``plan_probe``: what a replicated parameter and a pass cost beyond collectives
- ``toy_model``: what both are made of
- ``timing``: the clock, beside other programs as well
- ``overlap``: how much of an all-reduce backward hides
- ``machine``: memory limit, arithmetic and memory speed of a device
- ``axis_links``: messages between neighbouring stages, and collectives of tensor-parallel ranks
- ``slowdowns``: how unequal the devices of a pipeline are
"""
