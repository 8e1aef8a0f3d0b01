"""Tests of ``osdp/hardware``."""
