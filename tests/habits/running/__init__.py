"""What runs habits: contexts, plans, comparison, and processes."""
