"""``gen_fsdp_args``: the groups of ranks by the names that the OSDP paper's code gave them."""

from typing import Any

#: Options that force each use of groups, by the name of that use in the paper's code.
_FORCED: dict[str, dict[str, Any]] = {
    "group_sharding": {"strategy": "HYBRID_SHARD"},
    "communication_with_groups": {"strategy": "FULL_SHARD", "two_step": True},
    "none": {},
}

#: Uses of groups that :func:`gen_fsdp_args` knows.
GROUP_TYPES = tuple(_FORCED)


def gen_fsdp_args(
    nnodes: int, nproc_per_node: int, gsdp_type: str = "none", model_type: str | None = None
) -> dict[str, Any]:
    """Options of :class:`osdp.OSDP` that force one use of groups on every operator.

    The options can also be passed to fairscale's ``enable_wrap(wrapper_cls=OSDP, **gen_fsdp_args(...))``: the
    modules that fairscale's policy marks pass them on to the root. If the policy marks no module (by default
    it marks those of 100 million parameters or more), pass the options to the root yourself. All ranks must
    call this function with the same arguments.

    Args:
        nnodes: Machines; the ranks of each are neighbours, as torchrun numbers them.
        nproc_per_node: Ranks on each machine: the size of a group.
        gsdp_type: ``"group_sharding"``: sharded inside each machine, replicated across; every rank then holds
            ``nnodes`` times as much state. ``"communication_with_groups"``: sharded over all ranks, gathered
            across machines first and then inside, reduced the other way. ``"none"``: nothing is forced, and
            the search takes groups where they are faster and fit.
        model_type: Not needed, since any model will do; the paper's code passed it here.

    Returns:
        The options. With one machine, or one rank per machine, all links are alike: collectives then take one
        step, and ``"group_sharding"`` shards over the one machine, or not at all with one rank per machine.

    Raises:
        ValueError: There is no such type, or a number is not positive.

    >>> gen_fsdp_args(2, 8, "group_sharding")
    {'strategy': 'HYBRID_SHARD', 'group_sizes': (8,)}
    """
    del model_type
    faults = [
        f"{name} must be positive, got {value}"
        for name, value in (("nnodes", nnodes), ("nproc_per_node", nproc_per_node))
        if value < 1
    ]
    if gsdp_type not in _FORCED:
        faults.append(f"gsdp_type {gsdp_type!r} is unknown; there are {', '.join(_FORCED)}")
    if faults:
        raise ValueError("; ".join(faults))
    if gsdp_type == "none":
        return {}
    if min(nnodes, nproc_per_node) == 1:
        groups_of_one = gsdp_type == "group_sharding" and nnodes > 1
        return {"strategy": "NO_SHARD" if groups_of_one else "FULL_SHARD"}
    return {**_FORCED[gsdp_type], "group_sizes": (nproc_per_node,)}
