"""Tests of ``osdp/cluster/export``."""
