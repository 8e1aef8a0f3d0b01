"""Tests of ``osdp/search/token_slices``."""
