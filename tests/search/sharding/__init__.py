"""Tests of ``osdp/search/sharding``."""
