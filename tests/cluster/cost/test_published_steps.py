"""Steps that others have measured and published, and the model's seconds for them with published rates."""

import pytest

from osdp.cluster.cost.even_step import EvenSteps
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.hardware import Cluster, Gpu, NetworkLink, NodeGroup, NodeType
from osdp.cluster.plan import ParallelLayout, RecomputeLayers, Workload
from osdp.cluster.transformer import TransformerShape
from osdp.plan.dims import ParallelDims

#: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC
#: 2021), table 1: heads, hidden, layers, tp, pp, GPUs, global batch, achieved TFLOP/s of each GPU.
TABLE = [
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 163),
]
SEQUENCE, VOCABULARY = 2048, 51200
#: Selene: eight links of 200 Gbit/s for each node, of which 0.9 are reached; inside a node what eight A100
#: reach in an all-reduce of 1 GiB (229 GB/s), and take for one of 1 MiB (92.8 us) in 12 steps.
NODE = NodeType(
    name="DGX A100",
    gpu=Gpu("A100-80GB", 312e12, 81920 * 2**20, 2039e9, 108),
    devices=8,
    inside=NetworkLink(229e9, 7e-6),
    outside=NetworkLink(0.9 * 200e9, 2e-5),
)


#: Smith et al., "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B" (arXiv:2201.11990), section
#: 3.4: GPUs and seconds of a step of 1,920 samples, on the same machine.
TURING = [(2240, 60.1), (2800, 50.2), (3360, 44.4)]


def seconds(shape: TransformerShape, tp: int, pp: int, devices: int, batch: int) -> float:
    """A step at the best microbatch: the publications do not say which was used."""
    cluster = Cluster((NodeGroup(NODE, devices // NODE.devices),))
    steps = EvenSteps(ClusterPrices(cluster, Workload(shape=shape, global_batch=batch, flash=False)))
    dp = devices // (tp * pp)
    return min(
        steps.seconds(
            ParallelLayout(
                ParallelDims(pp, dp, tp), samples, batch // dp // samples, recompute=RecomputeLayers.FULL
            )
        )
        for samples in (1, 2, 4, 8)
        if batch % (dp * samples) == 0
    )


def gpt(layers: int, hidden: int, heads: int) -> TransformerShape:
    return TransformerShape(
        name="gpt", layers=layers, hidden=hidden, heads=heads, sequence=SEQUENCE, vocabulary=VOCABULARY,
        positions=SEQUENCE,
    )  # fmt: skip


def ratio(row: tuple[int, ...]) -> float:
    """Modelled over measured seconds."""
    heads, hidden, layers, tp, pp, devices, batch, tflops = row
    flops = 96 * batch * SEQUENCE * layers * hidden**2
    flops *= 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    measured = flops / devices / tflops / 1e12
    return seconds(gpt(layers, hidden, heads), tp, pp, devices, batch) / measured


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[5]} GPUs")
def test_steps_of_megatron_are_met(row: tuple[int, ...]) -> None:
    # Rows with several stages were interleaved, which leaves less of the bubble.
    assert ratio(row) == pytest.approx(1.0, abs=0.03 if row[4] == 1 else 0.1)


@pytest.mark.parametrize(("devices", "measured"), TURING)
def test_steps_of_megatron_turing_are_met(devices: int, measured: float) -> None:
    assert seconds(gpt(105, 20480, 128), 8, 35, devices, 1920) == pytest.approx(measured, rel=0.2)
