"""Tests of ``osdp/runtime/pipeline``."""
