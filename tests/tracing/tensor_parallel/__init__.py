"""Tests of ``osdp/tracing/tensor_parallel``."""
