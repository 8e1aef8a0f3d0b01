"""Tests of ``osdp/runtime``."""
