"""Bytes that frameworks keep are those of their own documents."""

import pytest

from osdp.cluster.plan import Workload
from osdp.cluster.targets import Target, as_trained_by
from tests.helpers.clusters import workload


@pytest.mark.parametrize(
    ("target", "whole", "sharded"),
    [
        (Target.MEGATRON_BF16, 6, 12),
        (Target.MEGATRON_FP16, 4, 16),
        (Target.DEEPSPEED_FP16, 4, 12),
        # BF16_Optimizer holds gradients of both formats.
        (Target.DEEPSPEED_BF16, 8, 12),
        (Target.FSDP, 6, 10),
    ],
)
def test_a_parameter_takes_what_its_framework_keeps(target: Target, whole: int, sharded: int) -> None:
    plain = workload()
    kept = as_trained_by(plain, target)
    assert (kept.weight_bytes + kept.gradient_bytes, kept.state_bytes) == (whole, sharded)
    assert isinstance(kept, Workload) and kept.shape == plain.shape
