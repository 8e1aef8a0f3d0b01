"""Layouts for people and for other programs. Reads values only.

Start at :func:`osdp.cluster.export.table.rows_of`.

- ``table``: layouts as text, CSV or JSON
- ``breakdown``: one of them, its time and memory by part
- ``html``: one of them as a page
- ``frameworks``: Megatron-LM, DeepSpeed, Accelerate and torchtitan
- ``launch_scripts``: torchrun on every node, and a batch script for Slurm
- ``pareto_plot``: time and cost of a step, drawn
- ``topology``: the links of a cluster as a graph
"""
