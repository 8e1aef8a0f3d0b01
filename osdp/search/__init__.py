"""Which plan is best: pure search over values. One decision space or one algorithm a file."""
