"""What would help where no plan fits the memory limit."""

from dataclasses import replace

from osdp.cost.sharding.problem import ShardingProblem
from osdp.plan.search_options import SLICES, SearchOptions
from osdp.plan.sharding import Mode
from osdp.search.sharding.solve import min_peak
from osdp.text import format_bytes


def suggestions(problem: ShardingProblem, options: SearchOptions) -> list[str]:
    """Changes that would lower the peak, with the bytes where these are known."""
    training, device = problem.training, problem.device
    found = []
    batch = problem.profile.local_batch
    if batch > 1:
        found.append(f"a local batch below {batch}; more microbatches keep the global batch as it is")
    if options.allowed != tuple(Mode):
        found.append("leaving strategy= out, which allows every mode, slices and recomputation")
    if training.param_dtype is None:
        found.append("param_dtype='bfloat16', which halves activations and gathered parameters")
    if options.allowed == tuple(Mode):
        found += _wider(problem, options)
    in_groups = options.allowed == (Mode.HYBRID_SHARD,)
    costs = problem.costs.by_group[problem.root_group if in_groups else 0]
    ranks = f"more ranks than {device.world_size}"
    found.append(
        f"{f'groups of more ranks than {costs.world_size}' if in_groups else ranks}: sharded parameters and "
        f"optimizer states take {format_bytes(float(costs.state_sharded[-1]))} of each device here"
    )
    return [*found, *_about_offload(problem, options)]


def _wider(problem: ShardingProblem, options: SearchOptions) -> list[str]:
    """Options ruled out by the caller that would lower the peak, each with the peak it reaches."""
    choices = {
        "recompute=True, which recomputes blocks in backward": replace(options, recompute=True),
        f"slices={SLICES}, which cuts large operators": replace(options, slices=SLICES),
    }
    here = min_peak(problem, options=replace(options, offload=False))
    peaks = {
        text: min_peak(problem, options=replace(wider, offload=False))
        for text, wider in choices.items()
        if wider != options
    }
    return [f"{text}: {format_bytes(peak)}" for text, peak in peaks.items() if peak < here]


def _about_offload(problem: ShardingProblem, options: SearchOptions) -> list[str]:
    """Advice on offloading, or the reason why it was not used."""
    host, known = problem.device.host, problem.profile.host_optimizer is not None
    if problem.device.kind == "cpu" and host is None:
        return ["(nothing was offloaded: what CPU devices hold is in host memory already)"]
    if not options.offload:
        return ["offload=True, which allows keeping parameters and optimizer states in host memory"]
    if host is None or not known:
        return ["a measured DeviceInfo.host and Profile.host_optimizer, which offloading needs"]
    needed = float(problem.costs.state_sharded[-1] + problem.costs.gradient_sharded[-1])
    if needed <= host.memory:
        return []
    return [f"more host memory than {format_bytes(host.memory)}: offloading all takes {format_bytes(needed)}"]
