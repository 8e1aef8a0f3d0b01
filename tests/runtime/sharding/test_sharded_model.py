"""What happens around a step: unused parameters, exceptions, evaluation, several forwards, frozen later."""

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from osdp import OSDP
from osdp.plan.sharding import Mode
from osdp.runtime import ShardedModel, apply
from tests.helpers.distributed import RankError, run
from tests.helpers.listening import Listening
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import plan_by_hand
from tests.test_parity import LAYOUTS, difference, pairs, whole

FEW = ("replicate all", "shard all", "mixed leaves")


def start(
    layout: str, *, find_unused_parameters: bool = True, param_dtype: str | None = None, **options: Any
) -> tuple[Net, ShardedModel]:
    torch.manual_seed(7)
    net = Net(gated=False, **options)
    modes, groups = LAYOUTS[layout]
    plan = plan_by_hand(net, modes, dist.get_world_size(), groups=groups, param_dtype=param_dtype)
    return net, apply(net, plan, find_unused_parameters=find_unused_parameters)


def step(net: nn.Module, seed: int = 0) -> None:
    batch = tokens(seed + dist.get_rank(), 2, 6)
    loss_of(net(batch), batch).backward()


def gradients(net: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else whole(p.grad) for n, p in net.named_parameters()}


def expected(
    work: Callable[[nn.Module, int], torch.Tensor], **options: Any
) -> dict[str, torch.Tensor | None]:
    """Gradients of the mean over ranks of ``work(net, rank)``, in one process."""
    torch.manual_seed(7)
    net = Net(gated=False, **options)
    ranks = range(dist.get_world_size())
    (sum(work(net, rank) for rank in ranks) / len(ranks)).backward()
    return {n: p.grad for n, p in net.named_parameters()}


def assert_same(got: dict[str, torch.Tensor | None], want: dict[str, torch.Tensor | None], what: str) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert difference(got[name], want[name]) < 1e-5, f"{what}: {name} {got[name]} {want[name]}"


def one_loss(net: nn.Module, rank: int) -> torch.Tensor:
    batch = tokens(rank, 2, 6)
    return loss_of(net(batch), batch)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("backward fails on purpose")


@contextlib.contextmanager
def failing(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def fail_forward(*_: Any) -> None:
    raise KeyError("forward fails on purpose")


def fail_backward(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return Failing.apply(output)


# Ranks


def recovers() -> None:
    want = expected(one_loss)
    for layout, place, hook in pairs(
        LAYOUTS, ("blocks.0.up", "blocks.1", "embed"), (fail_forward, fail_backward)
    ):
        net, _ = start(layout)
        for _ in range(2):
            with failing(net.get_submodule(place), hook), contextlib.suppress(KeyError):
                step(net, seed=50)
            net.zero_grad()
            step(net)
            assert_same(gradients(net), want, f"{layout}, {hook.__name__} in {place}")
            net.zero_grad()


def a_failed_forward_keeps_what_was_accumulated() -> None:
    want = expected(lambda net, rank: one_loss(net, rank) + one_loss(net, rank + 10))
    for layout in LAYOUTS:
        for keeps in (True, False):
            net, applied = start(layout)
            with applied.no_sync() if keeps else contextlib.nullcontext():
                step(net)
            with failing(net.blocks[1], fail_forward), contextlib.suppress(KeyError):
                step(net, seed=50)
            step(net, seed=10)
            assert_same(gradients(net), want, f"{layout}, keeps {keeps}")


def evaluates() -> None:
    for layout in LAYOUTS:
        for dtype in (None, "bfloat16"):
            net, _ = start(layout, param_dtype=dtype)
            before = {name: type(p) for name, p in net.named_parameters()}
            torch.manual_seed(7)
            plain = Net(gated=False)
            net.eval()
            with torch.no_grad():
                got = net(tokens(3, 2, 6))
                want = plain.to(got.dtype)(tokens(3, 2, 6))
            assert difference(got, want) < 1e-5, (layout, dtype)
            with torch.inference_mode():
                net(tokens(3, 2, 6))
            replicated = [n for n, k in before.items() if not issubclass(k, DTensor)]
            assert "replicate" in layout or not replicated
            net.train()
            step(net)
            net.zero_grad()
            after = {name: type(p) for name, p in net.named_parameters()}
            assert after == before


def evaluates_before_the_optimizer_step() -> None:
    """What the evaluation had gathered was computed with after the step."""
    for layout in LAYOUTS:
        losses = []
        for evaluates_first in (False, True):
            net, _ = start(layout)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            step(net)
            with torch.no_grad():
                if evaluates_first:
                    one_loss(net, 5)
                optimizer.step()
                losses.append(float(one_loss(net, 5)))
        assert losses[0] == losses[1], layout


def forwards_interleave() -> None:
    """Two forwards and an evaluation before one backward, and two backwards of two forwards."""

    def two(net: nn.Module, rank: int) -> torch.Tensor:
        return one_loss(net, rank) + one_loss(net, rank + 10)

    for recompute in (False, True):
        want = expected(two, recompute=recompute)
        for layout in LAYOUTS:
            net, applied = start(layout, recompute=recompute)
            first = one_loss(net, dist.get_rank())
            with torch.no_grad():
                one_loss(net, 5)
            (first + one_loss(net, dist.get_rank() + 10)).backward()
            assert_same(gradients(net), want, f"one backward, {layout}, {recompute}")
            for keeps in (False, True):
                net.zero_grad()
                first, second = one_loss(net, dist.get_rank()), one_loss(net, dist.get_rank() + 10)
                with applied.no_sync() if keeps else contextlib.nullcontext():
                    first.backward()
                second.backward()
                assert_same(gradients(net), want, f"two backwards, {layout}, {recompute}, {keeps}")


def low_precision_backwards_interleave() -> None:
    """The copies in low precision that the first backward used are needed by the second."""
    results = []
    for together in (True, False):
        net, _ = start("mixed blocks", param_dtype="bfloat16", recompute=True)
        first, second = one_loss(net, dist.get_rank()), one_loss(net, dist.get_rank() + 10)
        if together:
            (first + second).backward()
        else:
            first.backward()
            second.backward()
        results.append(gradients(net))
    for name, want in results[0].items():
        assert difference(results[1][name], want) < 2e-2, name


def backwards_begin_in_checkpoints() -> None:
    """The second of two met, in what it computed again, DTensors or parameters of another dtype."""
    apart = {"": Mode.FULL_SHARD, "blocks": Mode.NO_SHARD}
    cases: tuple[tuple[Any, str | None, float], ...] = (
        (apart, None, 1e-5),
        (Mode.NO_SHARD, "bfloat16", 2e-2),
    )
    for modes, dtype, tolerance in cases:
        results = []
        for together in (True, False):
            torch.manual_seed(7)
            net = Net(gated=False, recompute=True)
            apply(net, plan_by_hand(net, modes, dist.get_world_size(), param_dtype=dtype))
            seen: list[torch.Tensor] = []
            net.blocks[0].register_forward_hook(lambda _m, _a, output, seen=seen: seen.append(output))
            for view in (0, 10):
                net(tokens(view + dist.get_rank(), 2, 6))
            losses = [hidden.float().square().mean() for hidden in seen]
            if together:
                (losses[0] + losses[1]).backward()
            else:
                for each in losses:
                    each.backward()
            results.append(gradients(net))
        for name, want in results[0].items():
            assert difference(results[1][name], want) < tolerance, (dtype, name)


def recomputes_the_whole() -> None:
    want = expected(one_loss)
    for layout in FEW:
        for reentrant in (False, True):
            net, _ = start(layout)
            batch = tokens(dist.get_rank(), 2, 6)
            offset = torch.zeros(
                (), requires_grad=True
            )  # reentrant checkpoints need an input with a gradient
            if reentrant and layout != "replicate all":
                continue  # FSDP2 itself does not run in a reentrant checkpoint of the root

            def work(batch: torch.Tensor, offset: torch.Tensor, net: nn.Module = net) -> torch.Tensor:
                return net(batch) + offset

            loss_of(checkpoint(work, batch, offset, use_reentrant=reentrant), batch).backward()
            assert_same(gradients(net), want, f"{layout}, reentrant {reentrant}")


def freezes_later() -> None:
    for layout in LAYOUTS:
        net, _ = start(layout)
        step(net)
        net.zero_grad()
        net.blocks[0].up.requires_grad_(False)
        net.frozen.requires_grad_(True)
        step(net)
        got = gradients(net)
        assert got["blocks.0.up.weight"] is None
        assert got["frozen.weight"] is not None
        torch.manual_seed(7)
        plain = Net(gated=False)
        plain.frozen.requires_grad_(True)
        (sum(one_loss(plain, r) for r in range(2)) / 2).backward()
        assert difference(got["frozen.weight"], plain.frozen.weight.grad) < 1e-5, layout
        assert (
            difference(
                got["head.weight"] if "head.weight" in got else got["embed.weight"], plain.embed.weight.grad
            )
            < 1e-5
        )


def autograd_grad_is_let_alone() -> None:
    for layout in LAYOUTS:
        net, _ = start(layout)
        features = torch.randn(2, 6, 5, requires_grad=True)
        handle = net.embed.register_forward_hook(lambda m, a, o, features=features: o * 0 + features)
        (grad,) = torch.autograd.grad(net(tokens(0, 2, 6)).square().sum(), [features])
        handle.remove()
        assert grad.abs().sum() > 0
        step(net)
        assert_same(gradients(net), expected(one_loss), layout)


def zeroed_gradients_are_added_to() -> None:
    want = expected(one_loss)
    for layout in LAYOUTS:
        net, _ = start(layout)
        step(net, seed=50)
        net.zero_grad(set_to_none=False)
        step(net)
        got = gradients(net)
        assert_same(
            {n: g for n, g in got.items() if want[n] is not None},
            {n: g for n, g in want.items() if g is not None},
            layout,
        )


def models_can_be_freed() -> None:
    for layout in LAYOUTS:
        net, applied = start(layout, find_unused_parameters=True)
        step(net)
        alive = weakref.ref(net)
        del net, applied
        gc.collect()
        assert alive() is None, layout


def freezing_inside_an_accumulation_is_refused() -> None:
    net, applied = start("mixed leaves")
    with applied.no_sync():
        step(net)
    net.blocks[0].up.requires_grad_(False)
    with pytest.raises(RuntimeError, match="between the microbatches"):
        step(net)


def clips() -> None:
    torch.manual_seed(7)
    for norm_type in (2.0, 1.0, float("inf")):
        for layout in LAYOUTS:
            net, applied = start(layout)
            step(net)
            want = expected(one_loss)
            held = [g for g in want.values() if g is not None]
            norm = torch.linalg.vector_norm(
                torch.stack([torch.linalg.vector_norm(g, norm_type) for g in held]), norm_type
            )
            limit = norm.item() / 3
            if norm_type == 2.0:
                other, _ = start(layout)
                step(other)
                total = whole(torch.nn.utils.clip_grad_norm_(other.parameters(), limit, norm_type))
                assert difference(total, norm) < 1e-5, layout
                scaled = {n: None if g is None else g / 3 for n, g in want.items()}
                assert_same(gradients(other), scaled, f"torch's, {layout}")
            got = applied.clip_grad_norm_(limit, norm_type)
            assert difference(got, norm) < 1e-5, (layout, norm_type)
            assert_same(gradients(net), {n: None if g is None else g / 3 for n, g in want.items()}, layout)
            net.zero_grad()
            assert applied.clip_grad_norm_(1.0).item() == 0.0


class TwoDtypes(nn.Module):
    """A linear module in float32 beside a frozen one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.scale = nn.Linear(4, 4).bfloat16().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + self.scale(x.bfloat16()).float()


def unfreezing_another_dtype_is_refused() -> None:
    """Refused by name under every plan; where both shared a unit, FSDP2's bare assertion came instead."""
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD, {"up": Mode.NO_SHARD, "scale": Mode.FULL_SHARD}):
        net = TwoDtypes()
        apply(net, plan_by_hand(net, mode, dist.get_world_size()))
        net(torch.ones(2, 4)).sum().backward()
        net.zero_grad()
        net.scale.requires_grad_(True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'up.weight' of .*float32 and 'scale.weight' of"):
                net(torch.ones(2, 4))
        # All of another dtype is fine.
        net.up.requires_grad_(False)
        net(torch.ones(2, 4)).sum().backward()
        assert whole(net.scale.weight.grad).dtype == torch.bfloat16
        assert net.up.weight.grad is None


def parts_that_never_ran_keep_no_gradients() -> None:
    """FSDP2 looked for gradients of their whole parameters, which there were none of yet."""
    x = torch.linspace(-1, 1, 60).view(2, 6, 5)
    for layout in ("replicate all", "step sharded all", "shard all", "shard apart", "mixed leaves"):
        torch.manual_seed(7)
        net = Net(gated=False)
        modes, groups = LAYOUTS[layout]
        dtypes = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
        applied = apply(net, plan_by_hand(net, modes, dist.get_world_size(), groups=groups, **dtypes))
        with applied.no_sync():
            net.blocks[1](x).float().square().mean().backward()
        net.blocks[1](x).float().square().mean().backward()
        with_gradient = {name for name, p in net.named_parameters() if p.grad is not None}
        assert with_gradient == {n for n, _ in net.named_parameters() if n.startswith("blocks.1.")}, layout
        with applied.no_sync():
            step(net)
        step(net)
        assert all(p.grad is not None for p in applied.stored_parameters() if p.requires_grad), layout


class Spectral(nn.Module):
    """Complex weights beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(6, 6)
        self.spectrum = nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(self.spectrum(torch.fft.rfft(self.real(x))), n=6)


def complex_gradients_are_reduced_as_they_are() -> None:
    """FSDP2 reduced them in the dtype of the others, a real one."""
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        torch.manual_seed(3)
        plain = Spectral()
        torch.manual_seed(3)
        net = Spectral()
        applied = apply(net, plan_by_hand(net, mode, 2, reduce_dtype="float32"))
        with applied.no_sync():
            net(x[dist.get_rank()]).square().mean().backward()
        net(x[dist.get_rank()]).square().mean().backward()
        torch.stack([plain(x[rank]).square().mean() for rank in range(2)]).sum().backward()
        want = {name: p.grad for name, p in plain.named_parameters()}
        assert_same(gradients(net), want, str(mode))


def told_of_copies(mode: Mode, noise: float, *, alone: bool) -> list[str]:
    """What is told of four steps by gradients with noise of each rank's own; rank 0 may step alone."""
    net = Net(gated=False)
    model = OSDP(net, plan=plan_by_hand(net, mode, dist.get_world_size()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    logger, listening = logging.getLogger("osdp.runtime.sharding.backward_pass"), Listening()
    logger.addHandler(listening)
    try:
        for index in range(4):
            step(model, seed=index)
            with torch.no_grad():
                for grad in (p.grad for p in model.parameters() if p.grad is not None):
                    local = grad.to_local() if isinstance(grad, DTensor) else grad
                    local.add_(torch.randn_like(local), alpha=noise)
            if not alone or dist.get_rank() == 0:
                optimizer.step()
            optimizer.zero_grad()
    finally:
        logger.removeHandler(listening)
    return listening.told


def copies_that_come_apart_are_told() -> None:
    """Noise that each rank draws is right for shards; replicated parameters drifted apart in silence."""
    for mode, noise, alone, is_told in (
        (Mode.NO_SHARD, 0.1, False, True),
        (Mode.NO_SHARD, 0.0, False, False),
        (Mode.NO_SHARD, 0.0, True, True),  # the other rank waits for no step
        (Mode.FULL_SHARD, 0.1, False, False),
    ):
        told = told_of_copies(mode, noise, alone=alone)
        assert len(told) == (is_told and dist.get_rank() == 0), (mode, noise, alone, told)
        assert all("do not have the same values on all ranks" in words for words in told)


class Branches(nn.Module):
    """Two linears, of which a rank uses those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, uses: str) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        if "l" in uses:
            x = x + self.left(x)
        if "r" in uses:
            x = x + self.right(x)
        return x


BRANCHES: dict[str, Any] = {
    "replicated": (Mode.NO_SHARD, {"": "one"}),
    "replicated each": (Mode.NO_SHARD, {}),
    "sharded in the root": (Mode.FULL_SHARD, {"": "root"}),
    "mixed": ({"": Mode.FULL_SHARD, "left": Mode.NO_SHARD}, {"": "root"}),
}


def branches(layout: str, *, find: bool) -> tuple[Branches, ShardedModel]:
    torch.manual_seed(3)
    net = Branches()
    modes, groups = BRANCHES[layout]
    return net, apply(net, plan_by_hand(net, modes, 2, groups=groups), find_unused_parameters=find)


def unused_are_found() -> None:
    for layout in BRANCHES:
        for uses in (("l", "r"), ("lr", ""), ("l", "l")):
            net, applied = branches(layout, find=True)
            torch.manual_seed(3)
            plain = Branches()
            x = torch.randn(2, 5, 3)
            for _ in range(2):
                (sum(plain(x[r], uses[r]).square().mean() for r in range(2)) / 2).backward()
                net(x[dist.get_rank()], uses[dist.get_rank()]).square().mean().backward()
                got, want = gradients(net), {n: p.grad for n, p in plain.named_parameters()}
                assert_same(got, want, f"{layout} {uses}")
            net.zero_grad()
            plain.zero_grad()
            for index, used in enumerate((uses, uses[::-1])):
                (sum(plain(x[r], used[r]).square().mean() for r in range(2)) / 2).backward()
                with applied.no_sync() if index == 0 else contextlib.nullcontext():
                    net(x[dist.get_rank()], used[dist.get_rank()]).square().mean().backward()
            assert_same(gradients(net), {n: p.grad for n, p in plain.named_parameters()}, f"no_sync {layout}")


def unused_is_an_error() -> None:
    for layout in BRANCHES:
        net, _ = branches(layout, find=False)
        x = torch.randn(2, 5, 3)
        # The same on all ranks, so that all of them can go on.
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"never\.weight.*find_unused_parameters=False"):
                net(x[0], "lr").square().mean().backward()
        net.zero_grad()


def unused_on_one_rank(layout: str) -> None:
    net, _ = branches(layout, find=False)
    uses = ("lr", "l")[dist.get_rank()]
    (net(torch.randn(5, 3), uses) + 0 * net.never(torch.zeros(1, 4))).square().mean().backward()


CHECKS = (
    recovers,
    a_failed_forward_keeps_what_was_accumulated,
    evaluates,
    evaluates_before_the_optimizer_step,
    forwards_interleave,
    low_precision_backwards_interleave,
    backwards_begin_in_checkpoints,
    recomputes_the_whole,
    freezes_later,
    autograd_grad_is_let_alone,
    clips,
    zeroed_gradients_are_added_to,
    models_can_be_freed,
    freezing_inside_an_accumulation_is_refused,
    unfreezing_another_dtype_is_refused,
    parts_that_never_ran_keep_no_gradients,
    complex_gradients_are_reduced_as_they_are,
    copies_that_come_apart_are_told,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_steps_at_two_ranks(check: Callable[[], None]) -> None:
    run(2, check)


@pytest.mark.parametrize("check", [unused_are_found, unused_is_an_error], ids=lambda check: check.__name__)
def test_unused_parameters(check: Callable[[], None]) -> None:
    run(2, check)


@pytest.mark.parametrize("layout", ["replicated", "sharded in the root", "mixed"])
def test_a_parameter_unused_on_one_rank_is_refused_and_nothing_hangs(layout: str) -> None:
    with pytest.raises(RankError, match="find_unused_parameters=False") as caught:
        run(2, unused_on_one_rank, layout, timeout=30)
    assert caught.value.rank == 1
