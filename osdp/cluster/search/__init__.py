"""The best layouts of a transformer on a cluster, proven. Pure search over values.

Start at :mod:`osdp.cluster.search.layouts`.

- ``layouts``: branch and bound over the space of layouts
- ``space``: degrees, batches, schedules, recomputation, ZeRO stages, places
- ``bound``: a lower bound of any arrangement of a layout
- ``cell_orders``: the most layers that any order of places holds within a time
- ``part_bounds``: lower bounds of all parts of a cluster at once
- ``placement``: which stage goes to which place
- ``objectives``: least time, least cost, either under a limit, or the front of both
- ``measured_times``: times corrected by the measured steps of some layouts
- ``alternatives``: what other decisions would bring
- ``infeasible``: why there is no layout
"""
