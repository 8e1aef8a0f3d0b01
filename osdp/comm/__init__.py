"""Process groups and collectives of sharded units, shared by the profiler and the runtime.

Start at :func:`osdp.comm.collectives.set_route`.

- ``groups``: meshes and communicators of neighbouring ranks, each made once
- ``collectives``: all-gather and reduce-scatter over links of two speeds
- ``messages``: messages between two ranks, waited for in intervals
- ``objects``: Python objects gathered and broadcast
- ``shards``: which part of a tensor a rank holds
"""
