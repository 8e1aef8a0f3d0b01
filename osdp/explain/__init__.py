"""Why a plan is as it is, and what another setting would bring: from its basis alone, nothing is measured.

Start at :func:`osdp.explain.unit_choices.explain`.

- ``unit_choices``: alternatives of each unit, and what would make them better
- ``difference``: two plans beside each other
- ``what_if``: a plan searched again with another limit, batch, network, number of ranks or optimizer
- ``scaling``: profiles of other batches and optimizers, links of other networks and numbers of ranks
- ``memory_by_mode``: memory of plans that treat all operators alike
- ``step_memory``: memory along a step, by what it is
- ``step_time``: time of a step, by unit
- ``frontier``: throughput along one setting
- ``collect``: all of it, for a report
- ``rebuild``: a plan's problem, from its basis
"""
