"""Tests of ``osdp/runtime/checkpoint``."""
