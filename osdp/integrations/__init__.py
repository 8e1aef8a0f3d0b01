"""Thin bridges to other libraries.

Start at :mod:`osdp.integrations.huggingface`.

- ``huggingface``: models of transformers, and their Trainer
- ``accelerate``: Accelerate's Accelerator
- ``lightning``: strategies of Lightning's Trainer and Fabric
- ``data_parallel``: what these three need of a plan
- ``fsdp_arguments``: the arguments of FSDP and ``fully_shard``
- ``plan_export``: a plan for people who stay with FSDP2, transformers or Accelerate
- ``fairscale``: ``wrap`` and ``auto_wrap`` mark units of decision
- ``auto_wrap``: auto-wrap policies of torch and fairscale
- ``paper_options``: ``gen_fsdp_args``, by the names of the OSDP paper's code
"""
