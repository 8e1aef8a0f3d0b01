"""Tests of ``osdp/profiler``."""
