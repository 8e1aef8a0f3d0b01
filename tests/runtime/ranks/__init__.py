"""Tests of ``osdp/runtime/ranks``."""
