"""Process groups and collectives of sharded units: measured by the profiler, used by the runtime."""
