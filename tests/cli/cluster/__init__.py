"""Tests of ``osdp/cli/cluster``."""
