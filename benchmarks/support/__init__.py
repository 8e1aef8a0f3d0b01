"""What the benchmarks share: launching, timing, baselines and models."""
