"""Tests of ``osdp/model``."""
