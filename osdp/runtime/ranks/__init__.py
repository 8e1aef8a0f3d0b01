"""What the ranks of a model agree on: the plan, faults, and the order of their collectives.

Start at :class:`osdp.runtime.ranks.lockstep.Lockstep`.

- ``control``: small exchanges between ranks, and words in the store
- ``agreement``: what all ranks must have alike before a plan is applied
- ``shared_faults``: faults of some ranks, raised on all
- ``lockstep``: one order of collectives, though ranks run different parts of the model
- ``collective_order``: where collectives that were not seen yet belong in that order
- ``participants``: what runs collectives: sharded units and operators in slices
- ``backward_end``: the end of a backward, reached or not
"""
