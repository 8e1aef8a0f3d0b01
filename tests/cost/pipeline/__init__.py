"""Tests of ``osdp/cost/pipeline``."""
