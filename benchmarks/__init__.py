"""One script per claim, with its baselines in the same run; see the README for how to start them."""
