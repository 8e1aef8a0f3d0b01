"""What FSDP2 gives a sharded unit every parameter has in every mode: hooks, setters, entry points, freshness.

Each case runs under all layouts of the parity tests and in slices, against a single process in float64.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from osdp.plan.sharding import Mode
from osdp.runtime import ShardedModel, apply
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import plan_by_hand, split
from tests.test_parity import LAYOUTS, difference, whole

TOLERANCE = 1e-9

Gradients = dict[str, torch.Tensor | None]


class Towers(Net):
    """A net with parts that users call by themselves."""

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.gate(self.frozen(self.embed(tokens)))
        for block in self.blocks:
            x = block(x)
        return x


def plain(**options: Any) -> Towers:
    torch.manual_seed(7)
    return Towers(gated=False, **options).double()


def models(**options: Any) -> Iterator[tuple[str, Towers, ShardedModel]]:
    """The net under every layout, the last ones in slices."""
    for layout, (modes, groups) in LAYOUTS.items():
        for slices in (1, 2):
            net = plain(**options)
            plan = plan_by_hand(net, modes, dist.get_world_size(), groups=groups)
            cut = split(plan, net, slices)
            if slices > 1 and cut == plan:
                continue
            applied = apply(net, cut)
            yield f"{layout} in {slices}", net, applied


def loss(net: nn.Module, rank: int, seed: int = 0) -> torch.Tensor:
    batch = tokens(seed + rank, 2, 6)
    return loss_of(net(batch), batch)


def mean_loss(net: nn.Module, work: Callable[[nn.Module, int], torch.Tensor] = loss) -> torch.Tensor:
    """The mean of ``work`` over ranks, in one process."""
    ranks = range(dist.get_world_size())
    return sum((work(net, rank) for rank in ranks), torch.zeros(())) / len(ranks)


def gradients(net: nn.Module) -> Gradients:
    return {n: None if p.grad is None else whole(p.grad).clone() for n, p in net.named_parameters()}


def weights(net: nn.Module) -> Gradients:
    return {n: whole(p).detach() for n, p in net.named_parameters()}


def assert_same(got: Gradients, want: Gradients, what: str) -> None:
    assert got.keys() == want.keys(), what
    for name in want:
        assert difference(got[name], want[name]) < TOLERANCE, f"{what}: {name} {got[name]} {want[name]}"


# Hooks


def weights_after_steps(optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Gradients:
    """The weights of a single process after three steps over the batches of all ranks."""
    reference = plain()
    optimizer = optimizer_of(reference.parameters())
    for step in range(3):
        optimizer.zero_grad()
        mean_loss(reference, lambda net, rank, step=step: loss(net, rank, 10 * step)).backward()
        optimizer.step()
    return weights(reference)


def trains_in_backward() -> None:
    """An optimizer for each parameter, stepped by its post-accumulate hook, as LOMO and torchtune do."""
    want = weights_after_steps(partial(torch.optim.Adam, lr=0.01))
    for name, net, _ in models():
        trainable = [p for p in net.parameters() if p.requires_grad]
        optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in trainable}

        def update(parameter: nn.Parameter, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(update)
        for step in range(3):
            loss(net, dist.get_rank(), 10 * step).backward()
            assert all(p.grad is None for p in trainable), name
        assert_same(weights(net), want, name)


def post_accumulate_hooks_see_the_final_gradient() -> None:
    """Once for each backward that reduces, with what earlier ones left."""
    for name, net, applied in models():
        seen: dict[str, list[torch.Tensor]] = {}
        for key, parameter in net.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, key=key, seen=seen: seen.setdefault(key, []).append(whole(p.grad).clone())
                )
        with applied.no_sync():
            loss(net, dist.get_rank()).backward()
        assert not seen, name
        loss(net, dist.get_rank(), 10).backward()
        loss(net, dist.get_rank(), 20).backward()
        reference, want = plain(), []
        for seeds in ((0, 10), (20,)):
            for seed in seeds:
                mean_loss(reference, lambda n, rank, seed=seed: loss(n, rank, seed)).backward()
            want.append(gradients(reference))
        for key, values in seen.items():
            assert len(values) == 2, (name, key)
            for value, expected in zip(values, want, strict=True):
                assert difference(value, expected[key]) < TOLERANCE, (name, key)


def tensor_hooks_replace_the_contribution() -> None:
    """Called once for each backward, with the mean over ranks; what they return takes its place."""
    reference = plain()
    for parameter in reference.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: grad * grad)
    for seed in (0, 10):
        mean_loss(reference, lambda n, rank, seed=seed: loss(n, rank, seed)).backward()
    want = gradients(reference)
    for name, net, _ in models():
        calls: dict[str, int] = {}

        def square(grad: torch.Tensor, key: str, calls: dict[str, int] = calls) -> torch.Tensor:
            calls[key] = calls.get(key, 0) + 1
            return grad * grad

        handles = [
            p.register_hook(lambda grad, key=key, square=square: square(grad, key))
            for key, p in net.named_parameters()
            if p.requires_grad
        ]
        for seed in (0, 10):
            loss(net, dist.get_rank(), seed).backward()
        assert_same(gradients(net), want, name)
        assert set(calls.values()) == {2}, (name, calls)
        for handle in handles:
            handle.remove()
        net.zero_grad()
        loss(net, dist.get_rank()).backward()
        assert set(calls.values()) == {2}, name


def tensor_hooks_see_an_accumulation_once() -> None:
    """Those of weights in slices, which every backward reduces, were called in each of its backwards."""
    reference = plain()
    for seed in (0, 10):
        mean_loss(reference, lambda n, rank, seed=seed: loss(n, rank, seed)).backward()
    want = {name: None if grad is None else grad * grad for name, grad in gradients(reference).items()}
    for name, net, applied in models():
        calls: Counter[str] = Counter()

        def square(grad: torch.Tensor, key: str, calls: Counter[str] = calls) -> torch.Tensor:
            calls[key] += 1
            return grad * grad

        for key, parameter in net.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad, key=key, square=square: square(grad, key))
        with applied.no_sync():
            loss(net, dist.get_rank()).backward()
        assert not calls, name
        loss(net, dist.get_rank(), 10).backward()
        assert_same(gradients(net), want, name)
        assert set(calls.values()) == {1}, (name, calls)


def penalties_on_weights_arrive() -> None:
    """A part of the loss that is made of parameters, beside the forward and of parameters it does not use."""

    def work(net: nn.Module, rank: int) -> torch.Tensor:
        penalty = sum(whole(p).square().sum() for p in net.parameters() if p.requires_grad)
        return loss(net, rank) + 0.1 * penalty

    reference = plain()
    mean_loss(reference, work).backward()
    want = gradients(reference)
    for name, net, applied in models():
        part = loss(net, dist.get_rank())
        penalty = sum(p.square().sum() for p in applied.stored_parameters() if p.requires_grad)
        assert isinstance(penalty, torch.Tensor)
        (part + 0.1 * whole(penalty)).backward()
        assert_same(gradients(net), want, name)


def hooks_see_each_part_of_a_gradient_once() -> None:
    """A hook was called twice with what a penalty gave before the backward of the forward began."""

    def work(net: nn.Module, rank: int) -> torch.Tensor:
        return loss(net, rank) + 0.1 * sum(p.square().sum() for p in net.parameters() if p.requires_grad)

    reference = plain()
    mean_loss(reference, work).backward()
    want = {n: None if g is None else 2 * g for n, g in gradients(reference).items()}
    for name, net, applied in models():
        for parameter in applied.stored_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: 2 * grad)
        part = loss(net, dist.get_rank())
        penalty = sum(p.square().sum() for p in applied.stored_parameters() if p.requires_grad)
        assert isinstance(penalty, torch.Tensor)
        (part + 0.1 * whole(penalty)).backward()
        assert_same(gradients(net), want, name)


# Setters


def setters_reach_all_modes() -> None:
    reference = plain()
    mean_loss(reference).backward()
    want = gradients(reference)

    def times(factor: float, only: str = "") -> Gradients:
        return {n: None if g is None else g * (factor if n.startswith(only) else 1) for n, g in want.items()}

    for name, net, _ in models():
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(4.0 * dist.get_world_size())
        loss(net, dist.get_rank()).backward()
        assert_same(gradients(net), times(0.25), f"divide factor, {name}")
    for name, net, _ in models():
        net.blocks[0].set_gradient_divide_factor(0.5 * dist.get_world_size())
        loss(net, dist.get_rank()).backward()
        assert_same(gradients(net), times(2, "blocks.0"), f"divide factor of a block, {name}")
    for name, net, _ in models():
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda reduced: reduced.mul_(3))
        for _ in range(2):
            loss(net, dist.get_rank()).backward()
        assert_same(gradients(net), times(6), f"all-reduce hook, {name}")
    for name, net, _ in models():
        net.blocks[1].up.set_all_reduce_hook(lambda reduced: reduced.mul_(3))
        loss(net, dist.get_rank()).backward()
        assert_same(gradients(net), times(3, "blocks.1.up"), f"all-reduce hook of a leaf, {name}")


def gradient_sync_is_set_for_parts() -> None:
    """A module that does not synchronize has no gradients until it does, and then all of them."""
    reference = plain()
    for seed in (0, 10):
        mean_loss(reference, lambda n, rank, seed=seed: loss(n, rank, seed)).backward()
    both = gradients(reference)
    first = plain()
    mean_loss(first).backward()
    once = gradients(first)
    for where, recurse in (("blocks.0", True), ("blocks.0.up", False), ("", True), ("blocks.1", True)):
        for name, net, _ in models():
            module = net.get_submodule(where)
            module.set_requires_gradient_sync(False, recurse=recurse)
            module.set_requires_all_reduce(False)
            loss(net, dist.get_rank()).backward()
            kept = {n for n in once if n.startswith(where)}
            got = gradients(net)
            # A mark at most: see osdp.runtime.sharding.accumulation.
            left = [g for n, g in got.items() if n in kept and g is not None]
            assert all(g.abs().max() < 1e-20 for g in left if g.numel()), (where, name)
            want = {n: g for n, g in once.items() if n not in kept}
            assert_same({n: g for n, g in got.items() if n not in kept}, want, f"{where} kept, {name}")
            module.set_requires_gradient_sync(True, recurse=recurse)
            module.set_requires_all_reduce(True)
            loss(net, dist.get_rank(), 10).backward()
            assert_same(gradients(net), both, f"{where} reduced, {name}")


def prefetch_and_reshard_take_any_module() -> None:
    reference = plain()
    mean_loss(reference).backward()
    want = gradients(reference)
    for name, net, _ in models():
        net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[1].up])
        net.blocks[1].set_modules_to_backward_prefetch([net.blocks[0], net.embed])
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False)
                module.set_reshard_after_backward(False)
                module.set_is_last_backward(True)
                module.set_reduce_scatter_unused_params(True)
        loss(net, dist.get_rank()).backward()
        net.reshard()
        assert_same(gradients(net), want, name)
        net.blocks[0].unshard()
        assert type(net.blocks[0].up.weight) is nn.Parameter, name
        assert difference(net.blocks[0].up.weight, plain().blocks[0].up.weight) < TOLERANCE, name
        net.blocks[0].reshard()
        net.zero_grad()
        handle = net.unshard(async_op=True)
        assert handle is not None
        handle.wait()
        loss(net, dist.get_rank()).backward()
        net.reshard()
        assert_same(gradients(net), want, f"unsharded before, {name}")


# Entry points


def modules_are_called_by_themselves() -> None:
    """Parts in any order, before the whole and between, each with its backward or with one for all."""

    def chunked(net: nn.Module, rank: int) -> torch.Tensor:
        assert isinstance(net, Towers)
        batch = tokens(rank, 2, 6)
        hidden = net.encode(batch)
        logits = torch.cat([net.head(part) for part in hidden.split(2, dim=1)], dim=1)
        return loss_of(logits, batch) + net.blocks[1](net.embed(batch)).square().mean()

    def head_first(net: nn.Module, rank: int) -> torch.Tensor:
        assert isinstance(net, Towers)
        hidden = torch.linspace(-1, 1, 60, dtype=torch.float64).view(2, 6, 5) * (rank + 1)
        return net.head(hidden).square().mean() + net.blocks[0](hidden).sum() + loss(net, rank)

    for work in (chunked, head_first):
        for tied in (True, False):
            reference = plain(tied=tied)
            mean_loss(reference, work).backward()
            want = gradients(reference)
            for name, net, _ in models(tied=tied):
                for _ in range(2):
                    net.zero_grad()
                    work(net, dist.get_rank()).backward()
                    assert_same(gradients(net), want, f"{work.__name__}, {name}, tied {tied}")


def parts_are_evaluated() -> None:
    """A submodule is evaluated before training, between forward and backward, and after."""
    batch = tokens(3, 2, 6)
    reference = plain()
    mean_loss(reference).backward()
    want, features = gradients(reference), reference.encode(batch).detach()
    for name, net, _ in models():
        for first in (torch.no_grad, torch.inference_mode):
            with first():
                assert difference(net.encode(batch).clone(), features) < TOLERANCE, name
        net.zero_grad()
        part = loss(net, dist.get_rank())
        with torch.no_grad():
            assert difference(net.encode(batch), features) < TOLERANCE, name
        part.backward()
        assert_same(gradients(net), want, name)


def methods_are_forwards_where_registered() -> None:
    def work(net: nn.Module, rank: int) -> torch.Tensor:
        assert isinstance(net, Towers)
        return net.encode(tokens(rank, 2, 6)).square().sum()

    reference = plain()
    mean_loss(reference, work).backward()
    want = gradients(reference)
    for name, net, _ in models():
        register_fsdp_forward_method(net, "encode")
        for _ in range(2):
            net.zero_grad()
            work(net, dist.get_rank()).backward()
            assert_same(gradients(net), want, name)


def methods_of_parts_are_forwards_too() -> None:
    """Of modules that no unit wraps as well, where there was an AttributeError."""

    def work(net: nn.Module, rank: int) -> torch.Tensor:
        assert isinstance(net, Towers)
        x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(2, 2, 5) + rank
        block: Any = net.blocks[0]
        inner: torch.Tensor = block._work(x)
        return inner.square().sum()

    reference = plain()
    mean_loss(reference, work).backward()
    want = gradients(reference)
    for name, net, _ in models():
        register_fsdp_forward_method(net.blocks[0], "_work")
        for _ in range(2):
            net.zero_grad()
            work(net, dist.get_rank()).backward()
            assert_same(gradients(net), want, name)


# Freshness


def weights_are_never_stale() -> None:
    """A forward whose backward never comes, an optimizer step, another forward: it sees the new weights."""
    reference = plain()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    mean_loss(reference).backward()
    optimizer.step()
    want = reference(tokens(3, 2, 6)).detach()
    for name, net, _ in models():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        loss(net, dist.get_rank()).backward()
        net(tokens(1, 2, 6))
        optimizer.step()
        assert difference(net(tokens(3, 2, 6)).detach(), want) < TOLERANCE, f"after a step, {name}"
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0)
        assert not net(tokens(3, 2, 6)).detach().any(), f"after a change in place, {name}"


def weights_kept_from_a_backward_are_never_stale() -> None:
    """Units that are freed after their forward went on with what the last backward had gathered."""
    want = weights_after_steps(partial(torch.optim.SGD, lr=0.5))
    for name, net, _ in models():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_backward(False)
        for step in range(3):
            optimizer.zero_grad()
            loss(net, dist.get_rank(), 10 * step).backward()
            optimizer.step()
        net.reshard()
        assert_same(weights(net), want, name)


# Backwards of backwards


def gradient_penalty(net: nn.Module, rank: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).mul(rank + 1).requires_grad_()
    out = net(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (grad.norm(dim=1) - 1).square().mean()


def critic() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()


CRITICS: dict[str, Any] = {
    "replicated": Mode.NO_SHARD,
    "sharded": Mode.FULL_SHARD,
    "kept": Mode.SHARD_GRAD_OP,
    "mixed": {"0": Mode.FULL_SHARD, "2": Mode.NO_SHARD, "4": Mode.SHARD_GRAD_OP},
}


def second_backwards_are_planned_or_refused() -> None:
    reference = critic()
    mean_loss(reference, gradient_penalty).backward()
    want = gradients(reference)
    for name, modes in CRITICS.items():
        net = critic()
        plan = plan_by_hand(net, modes, dist.get_world_size())
        apply(net, plan)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="double_backward=True"):
                gradient_penalty(net, dist.get_rank())
        x = torch.ones(2, 4, dtype=torch.float64)
        net(x).sum().backward()
        assert all(p.grad is not None for p in net.parameters()), name
        other = critic()
        if name == "replicated":
            apply(other, plan, double_backward=True)
            gradient_penalty(other, dist.get_rank()).backward()
            assert_same(gradients(other), want, name)
        else:
            with pytest.raises(ValueError, match="replicates everything"):
                apply(other, plan, double_backward=True)


def accumulations_are_given_up() -> None:
    """What ``zero_grad()`` finds of an accumulation is gone, as under DDP, where it lies in ``grad``."""
    reference = plain()
    mean_loss(reference).backward()
    want = gradients(reference)
    for to_none in (True, False):
        for name, net, applied in models():
            optimizer = torch.optim.SGD(applied.stored_parameters(), lr=0.1)
            for _ in range(2):
                with applied.no_sync():
                    loss(net, dist.get_rank(), 50).backward()
                optimizer.zero_grad(set_to_none=to_none)
            loss(net, dist.get_rank()).backward()
            got = gradients(net)
            assert_same(
                {n: g for n, g in got.items() if want[n] is not None},
                {n: g for n, g in want.items() if g is not None},
                name,
            )


class Row(nn.Module):
    """Layers of which one is trained by itself while others are units beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def layers_that_did_not_run_have_no_gradient() -> None:
    """From the second time on, ranks join units that might have run: their zeros are no gradients."""
    for mode in Mode:
        if mode is Mode.HYBRID_SHARD:
            continue
        torch.manual_seed(7)
        net = Row().double()
        apply(net, plan_by_hand(net, mode, dist.get_world_size()))
        for _ in range(3):
            net.zero_grad()
            net.layers[1](torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            with_gradient = {name for name, p in net.named_parameters() if p.grad is not None}
            assert with_gradient == {"layers.1.weight", "layers.1.bias"}, mode


def layers_that_did_not_run_in_an_accumulation_have_no_gradient() -> None:
    """Of weights in slices the zeros that ranks had joined were kept, and handed out: optimizers stepped."""
    x = torch.ones(2, 6, dtype=torch.float64)
    for mode in (Mode.NO_SHARD, Mode.SHARD_OPTIMIZER, Mode.FULL_SHARD):
        for slices in (1, 2):
            torch.manual_seed(7)
            net = Row().double()
            plan = plan_by_hand(net, mode, dist.get_world_size())
            applied = apply(net, split(plan, net, slices))
            for _ in range(3):
                net.zero_grad()
                for keeps in (True, True, False):
                    with applied.no_sync() if keeps else nullcontext():
                        net.layers[1](x).sum().backward()
                with_gradient = {name for name, p in net.named_parameters() if p.grad is not None}
                assert with_gradient == {"layers.1.weight", "layers.1.bias"}, (mode, slices)


def modules_are_frozen_at_any_time() -> None:
    """Also between a forward and its backward, when modules hold what is computed with."""
    for name, net, applied in models():
        loss(net, dist.get_rank())
        net.blocks[0].requires_grad_(False)
        net(tokens(0, 2, 6))
        loss(net, dist.get_rank()).backward()
        frozen = [p for p in applied.parameters if p.name.startswith("blocks.0")]
        assert frozen, name
        assert not any(p.stored.requires_grad or p.stored.grad is not None for p in frozen), name
        for parameter in frozen:
            parameter.stored.requires_grad_(True)
        net.zero_grad()
        loss(net, dist.get_rank()).backward()
        assert all(p.stored.grad is not None for p in frozen), name


CASES = [
    modules_are_frozen_at_any_time,
    layers_that_did_not_run_have_no_gradient,
    layers_that_did_not_run_in_an_accumulation_have_no_gradient,
    accumulations_are_given_up,
    trains_in_backward,
    post_accumulate_hooks_see_the_final_gradient,
    tensor_hooks_replace_the_contribution,
    tensor_hooks_see_an_accumulation_once,
    penalties_on_weights_arrive,
    hooks_see_each_part_of_a_gradient_once,
    setters_reach_all_modes,
    gradient_sync_is_set_for_parts,
    prefetch_and_reshard_take_any_module,
    modules_are_called_by_themselves,
    parts_are_evaluated,
    methods_are_forwards_where_registered,
    methods_of_parts_are_forwards_too,
    weights_are_never_stale,
    weights_kept_from_a_backward_are_never_stale,
    second_backwards_are_planned_or_refused,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_mode(case: Callable[[], None]) -> None:
    run(2, case, timeout=90)
