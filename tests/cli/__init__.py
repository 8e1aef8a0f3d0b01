"""Tests of ``osdp/cli``."""
