"""Tests of ``osdp/runtime/token_slices``."""
