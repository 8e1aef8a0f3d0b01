"""Tests of ``osdp/profiler/links``."""
