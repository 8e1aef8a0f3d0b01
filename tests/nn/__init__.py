"""Tests of ``osdp/nn``."""
