"""A plan for people who stay with FSDP2, transformers or Accelerate: as much of it as these can express.

None of them has replicated operators with overlapped all-reduces, sharded optimizer states beside whole
parameters, or slices; what a plan has of these is kept gathered there (ZeRO-2), and told in the notes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from osdp.plan.plan import Plan
from osdp.plan.sharded_units import wrap_order
from osdp.plan.sharding import Mode, Route, ShardingPlan, Unit

#: What transformers calls the two ways of FSDP2 in a ``fsdp_plan``.
_FREE, _KEEP = "free_full_weight", "keep_full_weight"
#: The number of a layer in a name.
_LAYER = re.compile(r"\.\d+(\.|$)")


@dataclass(frozen=True)
class Exported:
    """A plan in the words of another library.

    Attributes:
        content: Python text, or a configuration of plain values.
        lost: What the other library cannot do, one sentence each.
    """

    content: Any
    lost: tuple[str, ...]


def to_fully_shard(plan: Plan) -> Exported:
    """A Python function ``shard(model, mesh)`` that calls ``fully_shard`` unit by unit.

    Raises:
        ValueError: The plan has stages or tensor-parallel ranks.
    """
    sharding = _sharding_of(plan)
    lines = [
        "import torch",
        "from torch.distributed._composable.checkpoint_activation import checkpoint",
        "from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy",
        "from torch.distributed.fsdp import fully_shard",
        "",
        "",
        "def shard(model, mesh):",
        f"    # {plan.summary}",
        *(f"    # Lost: {line}" for line in _lost(plan, sharding)),
        f"    policy = MixedPrecisionPolicy({_policy(plan)})",
    ]
    lines += [f"    checkpoint(model.get_submodule({name!r}))" for name in sharding.recomputed]
    for unit in wrap_order(_expressible(sharding.units)):
        modules = [f"model.get_submodule({name!r})" for name in unit.modules]
        target = modules[0] if len(modules) == 1 else f"[{', '.join(modules)}]"
        offload = "CPUOffloadPolicy()" if unit.offloaded else "OffloadPolicy()"
        lines += [
            "    fully_shard(",
            f"        {target},",
            f"        mesh=mesh, reshard_after_forward={_reshards(unit)}, mp_policy=policy,",
            f"        offload_policy={offload},",
            "    )",
        ]
    lines += ["    return fully_shard(model, mesh=mesh, mp_policy=policy)", ""]
    return Exported("\n".join(lines), _lost(plan, sharding))


def to_transformers(plan: Plan) -> Exported:
    """Arguments of transformers' ``DistributedConfig``, with the plan as its ``fsdp_plan``.

    Raises:
        ValueError: The plan has stages or tensor-parallel ranks.
    """
    sharding = _sharding_of(plan)
    units = wrap_order(_expressible(sharding.units))
    # Its rules name modules with "*" for the number of a layer: all layers get the choice of most of them.
    # Of tied modules it shards one, by rules of the model's own, which stay.
    tied = {name for d in sharding.decisions if len(d.modules) > 1 for name in d.modules}
    votes: dict[str, list[str]] = {}
    for unit in units:
        for name in (name for name in unit.modules if name not in tied):
            votes.setdefault(_LAYER.sub(r".*\1", name), []).append(_FREE if _reshards(unit) else _KEEP)
    styles = {rule: max(_FREE, _KEEP, key=found.count) for rule, found in votes.items()}
    # It wraps what is freed first, so that a block of its own rules would hold what is kept inside.
    blocks = {rule[: at + 2] for rule in styles for at in _ends_of_stars(rule)}
    styles |= {block: _KEEP for block in blocks - styles.keys()}
    differing = sum(len(found) - found.count(styles[rule]) for rule, found in votes.items())
    joined = sum(len(unit.modules) > 1 for unit in units)
    lost = list(_lost(plan, sharding))
    lost += [f"{differing} modules get the choice of most layers"] if differing else []
    lost += [f"{joined} units of several modules are gathered module by module"] if joined else []
    lost += _lost_offload(units, False)
    if sharding.recomputed:
        lost.append("which blocks are recomputed: gradient_checkpointing=True recomputes all")
    arguments: dict[str, Any] = {"fsdp_size": plan.dp, "fsdp_plan": styles}
    if plan.training.param_dtype is not None:
        arguments["fsdp_mixed_precision"] = True
        if plan.training.param_dtype != "bfloat16":
            lost.append(f"{plan.training.param_dtype}: it computes in bfloat16")
        if plan.training.reduce_dtype != "float32":
            lost.append(f"reductions in {_reduced_in(plan)}: it reduces in float32")
    elif plan.training.reduce_dtype is not None:
        lost.append(f"reductions in {_reduced_in(plan)}: gradients are reduced as they are")
    return Exported(arguments, tuple(lost))


def to_accelerate(plan: Plan, model: nn.Module) -> Exported:
    """A configuration of Accelerate, as ``accelerate launch --config_file`` reads it.

    Args:
        plan: The plan.
        model: The model, plain: Accelerate wraps by names of classes.

    Raises:
        ValueError: The plan has stages or tensor-parallel ranks.
    """
    sharding = _sharding_of(plan)
    sizes = {decision.operator: decision.nbytes for decision in sharding.decisions}
    units = _expressible(sharding.units)
    by_choice = {
        reshards: sum(sizes[name] for unit in units if _reshards(unit) is reshards for name in unit.operators)
        for reshards in (True, False)
    }
    classes = sorted(
        {type(model.get_submodule(name)).__name__ for unit in units for name in _blocks(unit)} - {""}
    )
    inner = [unit for unit in units if not unit.root]
    offloads = bool(inner) and all(unit.offloaded for unit in inner)
    machines = plan.basis.device.nodes if plan.basis is not None else 1
    fsdp: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": by_choice[True] > by_choice[False],
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "NO_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": offloads,
        "fsdp_activation_checkpointing": bool(sharding.recomputed),
    }
    if classes:
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = ",".join(classes)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_processes": plan.dp,
        "num_machines": machines,
        "machine_rank": 0,
        "mixed_precision": {"bfloat16": "bf16", "float16": "fp16"}.get(plan.training.param_dtype or "", "no"),
        "fsdp_config": fsdp,
    }
    lost = [
        *_lost(plan, sharding),
        "all decisions for single operators: one choice holds for all that is wrapped",
        *_lost_offload(inner, offloads),
    ]
    if machines > 1:
        lost.append("machine_rank and main_process_ip: pass them to accelerate launch on each machine")
    if not classes and inner:
        lost.append("all units: the plan has no whole blocks, so that the model is gathered as one")
    if plan.training.reduce_dtype not in (None, plan.training.param_dtype):
        lost.append(f"reductions in {_reduced_in(plan)}: it reduces in the dtype of mixed_precision")
    return Exported(content, tuple(lost))


def _sharding_of(plan: Plan) -> ShardingPlan:
    if not plan.is_whole:
        raise ValueError(
            f"the plan has pp={plan.pp} and tp={plan.tp}: only data parallelism can be written so"
        )
    return plan.stages[0].sharding


def _expressible(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Units with a mode of FSDP2: what is whole is kept gathered."""
    return tuple(
        unit if unit.mode.sharded else replace(unit, mode=Mode.SHARD_GRAD_OP, route=type(unit.route).FLAT)
        for unit in units
    )


def _reshards(unit: Unit) -> bool:
    return unit.mode in (Mode.FULL_SHARD, Mode.HYBRID_SHARD)


def _blocks(unit: Unit) -> Iterable[str]:
    """Modules of a unit that are numbered: elements of a list, which classes can name."""
    return (name for name in unit.modules if name.rpartition(".")[2].isdigit()) if not unit.root else ()


def _ends_of_stars(rule: str) -> Iterable[int]:
    return (found.start() for found in re.finditer(r"\.\*(?=\.)", rule))


def _policy(plan: Plan) -> str:
    training = plan.training
    named = {"param_dtype": training.param_dtype, "reduce_dtype": training.reduce_dtype}
    return ", ".join(f"{name}=torch.{value}" for name, value in named.items() if value is not None)


def _reduced_in(plan: Plan) -> str:
    return plan.training.reduce_dtype or plan.training.param_dtype or "the dtype of gradients"


def _lost_offload(units: Iterable[Unit], all_are: bool) -> list[str]:
    count = sum(unit.offloaded for unit in units)
    return [f"{count} units in host memory stay on the device"] if count and not all_are else []


def _lost(plan: Plan, sharding: ShardingPlan) -> tuple[str, ...]:
    sizes = {decision.operator: decision for decision in sharding.decisions}
    counts = {mode: sum(len(unit.operators) for unit in sharding.units if unit.mode is mode) for mode in Mode}
    lost = []
    if counts[Mode.NO_SHARD]:
        lost.append(
            f"{counts[Mode.NO_SHARD]} replicated operators are sharded and kept gathered after forward"
        )
    if counts[Mode.SHARD_OPTIMIZER]:
        lost.append(
            f"{counts[Mode.SHARD_OPTIMIZER]} operators with sharded optimizer states alone are likewise"
        )
    if counts[Mode.HYBRID_SHARD]:
        lost.append(f"{counts[Mode.HYBRID_SHARD]} operators sharded in groups are sharded over all ranks")
    cut = sum(decision.slices > 1 for decision in sizes.values())
    if cut:
        lost.append(f"{cut} operators in slices run whole")
    routed = [str(unit.route) for unit in sharding.units if unit.route is not Route.FLAT]
    if routed:
        routes = " and ".join(dict.fromkeys(routed))
        lost.append(f"{len(routed)} units use the backend's own collectives instead of {routes}")
    return tuple(lost)
