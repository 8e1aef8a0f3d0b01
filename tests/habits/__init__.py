"""Training habits: what users write around a model, each run by every framework and under every plan.

A habit (:mod:`tests.habits.running.habit`) is a function of a :class:`~tests.habits.running.context.Context`,
which hides what runs it: one process with the whole batch, which is what is right by definition, or ranks
under DDP, FSDP2 or OSDP under one of seven plans, each with its part of the batch. What the habit records
must be equal. The modules here are the subjects; ``running`` is what runs them.
"""
