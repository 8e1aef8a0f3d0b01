"""Reports on values: tables and graphs. Reads values only.

Start at :mod:`osdp.report.plan_table`, which ``print(plan)`` uses.

- ``plan_table``: a plan with the reasons of its decisions, and runs side by side
- ``pipeline_table``: a plan with stages, a row for each
- ``explanation_table``: alternatives of units, differences of plans, memory by mode
- ``html``: a plan as a page
- ``picture``: memory, time and throughput of a plan as PNG or SVG
- ``graph``: a ModelDesc as a networkx graph
"""
