"""Tests of ``osdp/cost/token_slices``."""
