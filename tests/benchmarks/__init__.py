"""Tests of the benchmarks' machinery."""
