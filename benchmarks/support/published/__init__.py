"""What others measured: configurations that ran or ran out of memory, each with its source (README.md)."""
