"""One script per claim, with its baselines in the same run; see the README for how to start them."""

import os

# Kineto announces each recording on stderr, into the progress bar, and the allocator each older block; both,
# and transformers, read these when they are loaded.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
