"""Tests of ``osdp/integrations``."""
