"""Process groups and collectives of sharded units, which the profiler measures and the runtime uses."""
