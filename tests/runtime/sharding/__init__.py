"""Tests of ``osdp/runtime/sharding``."""
