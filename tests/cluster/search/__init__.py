"""Tests of ``osdp/cluster/search``."""
