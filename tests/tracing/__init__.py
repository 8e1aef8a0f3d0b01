"""Tests of ``osdp/tracing``."""
