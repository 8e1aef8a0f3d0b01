"""Thin adapters to other libraries: transformers, fairscale, torch's auto-wrap policies."""
