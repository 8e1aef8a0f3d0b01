"""Describe a model on fake tensors, and measure it segment by segment on a device."""
