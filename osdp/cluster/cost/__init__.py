"""What a layout of a transformer on a cluster costs. Pure functions of values.

Start at :func:`osdp.cluster.cost.step.price`.

- ``step``: the formula of a step, and the price of one layout by it
- ``layer_work``: what one rank computes, keeps and exchanges for a layer
- ``layer_time``: seconds of a layer: a roofline beside the host's calls
- ``rates``: shares of its specification that a device reaches, tiles and waves of matrix products
- ``context_exchange``: keys and values that context-parallel ranks exchange
- ``corrections``: what measured steps add to these rates
- ``measured_layers``: measured seconds, carried to other batches and degrees
- ``links``: devices of a stage, the links between them, and collectives over these
- ``item_prices``: costs of one item
- ``stage``: seconds and bytes of stages, from the number of their items
- ``layer_runs``: stages made of runs of layers that are stored alike
- ``mixed_runs``: the best one or two runs that fit
- ``stage_table``: all stages of a layout on one kind of slot
- ``even_step``: the step of evenly divided layers on a homogeneous cluster
"""
