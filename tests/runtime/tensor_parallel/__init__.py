"""Tests of ``osdp/runtime/tensor_parallel``."""
