"""What a training measured of its steps, as corrections of what its plan was searched from.

Values and pure functions: nothing here measures, communicates or switches. Start at
:func:`osdp.refine.next_plan.next_plan`.

- ``next_plan``: a plan searched again from corrected values, and whether it is worth a switch
- ``refinement``: what refining has changed
- ``measurement``: what was measured of a step
- ``corrections``: profile and devices, corrected by a measurement
- ``segment_profiles``: profiles with other times, by stretch of the trace, or with more memory
- ``link_times``: latency and bandwidth of links, from timed collectives
- ``stretches``: the parts of a trace that can be timed apart
"""
