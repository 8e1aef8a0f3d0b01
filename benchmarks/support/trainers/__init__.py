"""A training that is stopped and resumed on another number of ranks, under each trainer that people use.

- ``problem``: the model, its data and plans, the same for all
- ``runs``: what each trainer does with them
"""
