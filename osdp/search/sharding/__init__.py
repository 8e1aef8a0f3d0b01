"""Modes and units of all operators that make a step fastest within the memory limit.

Start at :mod:`osdp.search.sharding.planner`, then :func:`osdp.search.sharding.solve.solve`.

- ``planner``: a model, its profiles and the devices to the best Plan
- ``candidates``: which units may be formed, and in which modes
- ``solve``: the best units under one limit, with a proven bound
- ``root_unit``: which operators may be in the root's unit
- ``cutting_planes``: a few moments at a time, until the simulated peak fits
- ``known_rows``: the moments that were found, as rows over candidates
- ``chain``: the best path along a chain under several limits
- ``initial_plans``: simple plans to start from
- ``local_search``: better neighbours of a plan
- ``single_changes``: a plan that is not proven best, improved by single units
- ``ties``: among plans that nothing shows to be faster, the simplest
- ``suggestions``: what would help where nothing fits
- ``explain``: the reason of each decision: what the next-best choice would have cost
- ``milp``: an independent checker, by HiGHS
"""
