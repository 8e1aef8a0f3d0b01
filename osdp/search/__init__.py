"""Search for the best plan: pure, numbers in, numbers out."""
