"""Tests of ``osdp/integrations/huggingface``."""
