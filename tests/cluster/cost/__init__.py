"""Tests of ``osdp/cluster/cost``."""
