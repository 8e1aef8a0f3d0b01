"""Tests of ``osdp/plan``."""
