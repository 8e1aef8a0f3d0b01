"""Clipping in float64: the norm is torch's of the whole gradients, whatever is sharded and however large."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp.plan.sharding import Mode
from osdp.runtime import ShardedModel, apply
from tests.helpers.distributed import run
from tests.helpers.nets import Net, tokens
from tests.helpers.plans import plan_by_hand, split
from tests.test_parity import LAYOUTS, difference, whole

NORM_TYPES = (0.5, 1.0, 2.0, 3.0, math.inf)


def make() -> Net:
    torch.manual_seed(7)
    return Net(gated=False).double()


def start(layout: str) -> tuple[Net, ShardedModel]:
    net = make()
    modes, groups = LAYOUTS.get(layout, (Mode.FULL_SHARD, {}))
    plan = plan_by_hand(net, modes, dist.get_world_size(), groups=groups)
    return net, apply(net, split(plan, net, 2) if layout == "in slices" else plan)


def loss(net: nn.Module, rank: int, scale: float) -> torch.Tensor:
    batch = tokens(rank, 2, 6)
    return scale * nn.functional.cross_entropy(net(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def clips_as_torch_does(layout: str, norm_type: float, scale: float) -> None:
    plain = make()
    ranks = range(dist.get_world_size())
    (sum(loss(plain, rank, scale) for rank in ranks) / len(ranks)).backward()
    limit = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])) / 3
    want = nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
    net, applied = start(layout)
    loss(net, dist.get_rank(), scale).backward()
    got = applied.clip_grad_norm_(limit, norm_type, error_if_nonfinite=True)
    where = (layout, norm_type, scale)
    assert got.dtype == torch.float64 and difference(got, want) < 1e-12, (where, got, want)
    for (name, parameter), wanted in zip(net.named_parameters(), plain.parameters(), strict=True):
        if wanted.grad is not None:
            assert difference(whole(parameter.grad) / limit, wanted.grad / limit) < 1e-12, (where, name)


def clips_large_gradients() -> None:
    # Norms were joined in float32, which ends at 3e38: they were infinite, and all gradients became 0.
    for layout in (*LAYOUTS, "in slices"):
        clips_as_torch_does(layout, 2.0, 1e100)
        clips_as_torch_does(layout, 1.0, 1e200)
    for layout, norm_type in itertools.product(("mixed leaves", "in slices"), NORM_TYPES):
        clips_as_torch_does(layout, norm_type, 1.0)


def says_what_is_not_finite() -> None:
    for layout in ("replicate all", "shard all", "mixed leaves"):
        net, applied = start(layout)
        loss(net, dist.get_rank(), math.inf).backward()
        before = {name: p.grad for name, p in net.named_parameters()}
        with pytest.raises(RuntimeError, match=r"norm of order 2\.0 .* is (inf|nan), .*error_if_nonfinite"):
            applied.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert all(p.grad is before[name] for name, p in net.named_parameters())
        norm = applied.clip_grad_norm_(1.0)
        assert not norm.isfinite()
        net.zero_grad()
        assert applied.clip_grad_norm_(1.0, error_if_nonfinite=True).item() == 0.0


def gradients_on_one_rank_only() -> None:
    """What a rank lacks, for instance because a user dropped it, the norm counts on the others."""
    net, applied = start("shard apart")
    loss(net, dist.get_rank(), 1.0).backward()
    total = applied.clip_grad_norm_(math.inf)
    if dist.get_rank() == 0:
        net.zero_grad()
    share = applied.clip_grad_norm_(math.inf)
    assert 0 < share < total
    both = [torch.zeros_like(share) for _ in range(2)]
    dist.all_gather(both, share)
    assert both[0] == both[1]


CHECKS = (
    clips_large_gradients,
    says_what_is_not_finite,
    gradients_on_one_rank_only,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_clipping_in_float64(check: Callable[[], None]) -> None:
    run(2, check)
