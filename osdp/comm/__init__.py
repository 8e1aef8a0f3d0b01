"""Process groups and collectives of sharded units, shared by the profiler and the runtime.

Start at :func:`osdp.comm.collectives.set_route`.

- ``bucket_layouts``: how tensors lie in one flat buffer
- ``averaging``: means over ranks
- ``groups``: meshes and communicators of neighbouring ranks, each made once
- ``collectives``: all-gather and reduce-scatter over links of two speeds
- ``messages``: messages between two ranks, waited for in intervals
- ``part_exchange``: a sum over ranks of which each needs its own part
- ``objects``: Python objects gathered and broadcast
- ``first_values``: tensors broadcast, however they lie in memory
- ``shards``: which part of a tensor a rank holds
"""
