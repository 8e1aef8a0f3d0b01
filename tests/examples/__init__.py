"""Tests of the examples, and of the scripts that start them."""
