"""Tests of osdp; they mirror its layout."""
