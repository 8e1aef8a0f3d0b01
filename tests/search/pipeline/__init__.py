"""Tests of ``osdp/search/pipeline``."""
