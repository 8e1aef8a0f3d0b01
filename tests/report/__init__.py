"""Tests of ``osdp/report``."""
