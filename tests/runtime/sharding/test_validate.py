import pytest

from osdp.plan.sharding import Mode, Route
from osdp.runtime.sharding.validate import check_backend
from tests.helpers.nets import Net
from tests.helpers.plans import in_groups, plan_by_hand


def test_gloo_has_no_messages_from_rank_to_rank_on_gpus() -> None:
    """A gather of SHARD_OPTIMIZER between two ranks of one GPU died in gloo: "Bad address"."""
    net = Net(gated=False)
    stepped = plan_by_hand(net, Mode.SHARD_OPTIMIZER, 2)
    sharded = plan_by_hand(net, Mode.FULL_SHARD, 2)
    exchanged = in_groups(sharded, mode=Mode.FULL_SHARD, group_size=0, route=Route.EXCHANGE)
    for plan, mode in ((stepped, "SHARD_OPTIMIZER"), (exchanged, "FULL_SHARD")):
        sharding = plan.stages[0].sharding
        with pytest.raises(ValueError, match=f'{mode} needs: .*backend="nccl"'):
            check_backend(sharding, "cuda", "gloo")
        check_backend(sharding, "cuda", "nccl")
        check_backend(sharding, "cpu", "gloo")
    check_backend(sharded.stages[0].sharding, "cuda", "gloo")
