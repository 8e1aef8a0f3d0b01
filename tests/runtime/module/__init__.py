"""Tests of ``osdp/runtime/module``."""
