"""Measures models and devices; ``roofline`` estimates a profile without a device.

Start at :func:`osdp.profiler.measure.profile_model`.

- ``measure``: a measured Profile: segments, optimizer step, resident memory
- ``segments``: seconds and bytes of every distinct segment
- ``reduced_model``: a copy with only those blocks that are needed to measure
- ``block_stubs``: stand-ins for the repeats of a block
- ``repeats``: which blocks have to run for real
- ``footprint``: activation bytes of the whole model, from runs of a reduced one
- ``stopwatch``: times every interval of a run
- ``workspace``: memory of CUDA kernels inside one operation
- ``optimizer``: seconds of an optimizer step
- ``token_latency``: seconds of slices of a sequence on one stage
- ``roofline``: a profile from FLOPs and bytes alone
- ``progress``: a progress bar where tqdm is installed
- ``cache``: measurements kept in the user's cache folder
- ``links``: collectives, messages and devices, measured
"""
