"""Launch scripts of a cluster plan: torchrun on every node, a batch script for Slurm, a table of the nodes.

Ranks are numbered along the stages: nodes are listed in the order of the stages placed on them, and this
order gives each its ``--node-rank``, so that rank 0 is in the first stage.
"""

import csv
import io
from collections.abc import Sequence
from itertools import groupby

from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan, StageSlot

_PORT = 29500


def node_order(slots: Sequence[StageSlot]) -> tuple[int, ...]:
    """Kinds of the nodes in the order of the stages."""
    order: list[int] = []
    stage = 0
    while stage < len(slots):
        slot = slots[stage]
        order += [kind for kind, count in enumerate(slot.nodes) for _ in range(count)]
        stage += slot.shares
    return tuple(order)


def node_table(plan: ClusterPlan, cluster: Cluster) -> str:
    """The nodes in the order of their ranks as CSV: number, name, first and last rank, stages."""
    text, rank = io.StringIO(), 0
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("node", "name", "first rank", "last rank", "stages"))
    for number, kind in enumerate(node_order(plan.slots)):
        node = cluster.groups[kind].node
        last = rank + node.devices - 1
        writer.writerow((number, node.name, rank, last, _stages(plan, number)))
        rank = last + 1
    return text.getvalue()


def launch_script(plan: ClusterPlan, cluster: Cluster, program: str) -> str:
    """Shell script that starts ``program`` on one node; its argument is the number of the node."""
    order = node_order(plan.slots)
    called = "# The program is yours: it calls OSDP(model, plan=Plan.load(...)) with the exported plan."
    own = [] if program.startswith("-m osdp ") else [called]
    lines = [
        "#!/usr/bin/env bash",
        f"# bash launch.sh NODE on each of {len(order)} nodes; MASTER_ADDR is the address of node 0.",
        *own,
        'cd "$(dirname "$0")"',
        ': "${MASTER_ADDR:?address of node 0}"',
        'case "${1:?number of this node}" in',
    ]
    for rank, kind in enumerate(order):
        node = cluster.groups[kind].node
        lines.append(f"{rank})  # {node.name}, stages {_stages(plan, rank)}")
        lines.append(f"    {_torchrun(len(order), str(rank), node.devices, program)} ;;")
    lines += [f'*) echo "nodes are 0 to {len(order) - 1}, got $1" >&2; exit 1 ;;', "esac"]
    return "\n".join(lines) + "\n"


def batch_script(plan: ClusterPlan, cluster: Cluster, program: str) -> str:
    """Slurm script for ``sbatch``; consecutive nodes of one kind form a component of a heterogeneous job."""
    order = node_order(plan.slots)
    runs = [(kind, len(list(run))) for kind, run in groupby(order)]
    lines = ["#!/bin/bash"]
    for index, (kind, count) in enumerate(runs):
        node = cluster.groups[kind].node
        if index:
            lines.append("#SBATCH hetjob")
        lines += [
            f"#SBATCH --nodes={count}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={node.devices}",
            f"#SBATCH --constraint={node.name}",
        ]
    listed = "SLURM_JOB_NODELIST_HET_GROUP_0" if len(runs) > 1 else "SLURM_JOB_NODELIST"
    lines += ["", f'export MASTER_ADDR=$(scontrol show hostnames "${listed}" | head -1)']
    first = 0
    for index, (kind, count) in enumerate(runs):
        where = f"--het-group={index} " if len(runs) > 1 else ""
        torchrun = _torchrun(
            len(order), f"$(({first} + SLURM_NODEID))", cluster.groups[kind].node.devices, program
        )
        # Each component of a heterogeneous job numbers its nodes from 0.
        lines += [f"srun {where}bash -c '{torchrun}' &", "started+=($!)"]
        first += count
    # The job fails with the exit status of a failed component.
    lines += ["status=0", 'for each in "${started[@]}"; do wait "$each" || status=$?; done', 'exit "$status"']
    return "\n".join(lines) + "\n"


def _torchrun(nodes: int, rank: str, devices: int, program: str) -> str:
    return (
        f"torchrun --nnodes {nodes} --node-rank {rank} --nproc-per-node {devices} "
        f'--master-addr "$MASTER_ADDR" --master-port {_PORT} {program}'
    )


def _stages(plan: ClusterPlan, node: int) -> str:
    """Numbers of the stages on a node, as text."""
    found: list[int] = []
    begin = 0
    stage = 0
    while stage < len(plan.slots):
        slot = plan.slots[stage]
        end = begin + sum(slot.nodes)
        if begin <= node < end:
            found += range(stage, stage + slot.shares)
        begin, stage = end, stage + slot.shares
    return f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0])
