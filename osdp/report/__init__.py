"""Reports on values: tables and graphs. Reads values only.

Start at :mod:`osdp.report.plan_table`, which ``print(plan)`` uses.

- ``plan_table``: a plan with the reasons of its decisions, and runs side by side
- ``pipeline_table``: a plan with stages, a row for each
- ``graph``: a ModelDesc as a networkx graph
"""
