"""Tests of ``osdp/cost/sharding``."""
