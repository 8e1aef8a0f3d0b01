"""Describes a model on fake tensors, and measures it segment by segment on a device."""
