"""Tests of ``osdp/cluster``."""
