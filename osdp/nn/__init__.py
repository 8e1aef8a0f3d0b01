"""What tracing, profiler and runtime all know about modules: operators in slices, and what runs them.

Start at :class:`osdp.nn.modules.SplitLinear`.

- ``modules``: ``SplitLinear``, ``SplitEmbedding``, ``LMHeadLoss``; which modules can run in slices
- ``functional``: linear, embedding and cross-entropy in slices of their weight
- ``sliced_weight``: where slices begin, how one is gathered, how its gradient is scattered
- ``embeddings``: embeddings that no plan can train
- ``fake_tensors``: tensors for which operations run without computing
- ``random_states``: states of random number generators: read, set and compared
"""
