"""The planner before there is a cluster: layers instead of operators, no torch but in ``runnable``.

Start at :mod:`osdp.cluster.search.layouts`.

- ``hardware``: machines with accelerators that may differ, their links and prices
- ``gpus.json``: the known accelerators; to add one, add a line
- ``file``: cluster files, YAML or JSON
- ``devices``: from text such as ``8 x A100`` to a DeviceInfo
- ``transformer``: a transformer by its few numbers
- ``known_transformers``: transformers by name
- ``infer_shape``: those numbers, from a ModelDesc
- ``layer_profile``: measured seconds of a transformer's layers
- ``plan``: how a transformer is laid over a cluster, and what a step of that takes
- ``measured_layout``: what a step of a layout took where it ran
- ``predicted``: the parts of a step's time and of a stage's memory
- ``spread``: how far measurements may lie from predictions
- ``targets``: frameworks that train a plan, and what they keep
- ``explanation``: a chosen plan, and what it was chosen from
- ``cost``: what a layout costs
- ``search``: which layout is best
- ``calibration``: coefficients of the time model, from measured steps
- ``export``: tables, pages, launch scripts, and files of other frameworks
- ``runnable``: from a layout to a plan that runs
"""
