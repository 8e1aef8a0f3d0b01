"""The programs that the scripts start: training on real text, and slices of sequences."""
