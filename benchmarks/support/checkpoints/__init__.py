"""Checkpoints under measurement.

- ``layouts``: plans, numbers of ranks, stages and tensor parallelism to save under and load under
- ``costs``: seconds and bytes of saving and loading, beside torch's own way
- ``corruption``: changed bits and lost bytes
"""
