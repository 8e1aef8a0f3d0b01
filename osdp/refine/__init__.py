"""Refining: a plan is corrected by what its own steps took, and the running model goes on under a better one.

Start at :class:`osdp.refine.refiner.Refiner`, which records, compares ranks and switches. The search behind
it is pure: :func:`osdp.refine.next_plan.next_plan`.

- ``refiner``: when steps are recorded, and what follows
- ``checks``: that a model and its optimizers can be refined
- ``combined``: what all ranks recorded, as one measurement

Values and pure functions:

- ``next_plan``: a plan searched again from corrected values, and whether it is worth a switch
- ``refinement``: what refining has changed
- ``measurement``: what was measured of a step
- ``corrections``: profile and devices, corrected by a measurement
- ``segment_profiles``: profiles with other times, by stretch of the trace, or with more memory
- ``link_times``: latency and bandwidth of links, from timed collectives
- ``stretches``: the parts of a trace that can be timed apart
"""
