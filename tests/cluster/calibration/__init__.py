"""Tests of ``osdp/cluster/calibration``."""
