"""Tests of ``osdp/comm``."""
