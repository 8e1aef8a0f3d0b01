"""Tests of ``osdp/cost``."""
