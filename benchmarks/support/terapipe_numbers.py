"""What TeraPipe (Li et al., ICML 2021, arXiv 2102.07988v2) reports, and the machines it reports it from.

48 AWS p3.16xlarge machines of 8 V100 (16 GB, NVLink) and 25 Gbit/s each. The baseline is GPipe with
microbatches of one sequence.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Setting:
    """One row of the paper's tables 1 and 2.

    Attributes:
        number: Its number there, or a name.
        layers: Of the model.
        hidden: Channels.
        heads: Of attention.
        length: Tokens of a sequence.
        batch: Sequences of a step.
        dp: Data-parallel pipelines.
        pp: Stages of each.
        tp: GPUs that compute a layer together.
        whole: Seconds of an iteration without slices of sequences, as published.
        sliced: With TeraPipe's slices.
    """

    number: str
    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    dp: int
    pp: int
    tp: int
    whole: float
    sliced: float

    @property
    def speedup(self) -> float:
        """As published."""
        return self.whole / self.sliced

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.number}: {self.dp}x{self.pp}x{self.tp}, batch {self.batch}, {self.length} tokens"


#: (layers, hidden, heads) of the paper's GPT-3 models: its code's configurations.
_1B, _13B, _44B, _175B = (24, 2048, 16), (40, 5120, 40), (96, 6144, 48), (96, 12288, 96)

#: Figure 5 and table 2. Seconds of (2), (3), (4) and (7) are read from the figure.
SETTINGS = (
    Setting("1", *_1B, 2048, 128, 8, 24, 1, 1.517, 1.254),
    Setting("2", *_1B, 2048, 72, 2, 12, 8, 1.03, 1.03),
    Setting("3", *_1B, 2048, 72, 1, 24, 8, 0.93, 0.92),
    Setting("4", *_13B, 2048, 32, 2, 20, 8, 2.6, 1.9),
    Setting("5", *_13B, 2048, 32, 1, 40, 8, 1.863, 1.328),
    Setting("6", *_44B, 2048, 8, 4, 96, 1, 13.319, 7.103),
    Setting("7", *_44B, 2048, 8, 2, 24, 8, 4.311, 2.771),
    Setting("8", *_44B, 2048, 8, 1, 48, 8, 2.662, 1.111),
    Setting("9", *_175B, 2048, 2, 1, 96, 4, 9.990, 1.481),
    Setting("10", *_175B, 2048, 2, 1, 48, 8, 5.822, 1.160),
)
BY_NUMBER = {setting.number: setting for setting in SETTINGS}

#: Figure 7: setting (5) with longer sequences and as many tokens less in the batch.
LONG = tuple(
    replace(BY_NUMBER["5"], number=f"5, {length}", length=length, batch=batch, whole=whole, sliced=sliced)
    for length, batch, whole, sliced in (
        (4096, 8, 2.526, 0.913),
        (6144, 4, 3.754, 0.756),
        (8192, 2, 4.978, 0.636),
    )
)

#: Figure 6: seconds of an iteration with so many uniform slices.
UNIFORM = {
    "8": {1: 2.662, 4: 1.241, 8: 1.255, 16: 1.241},
    "9": {1: 9.990, 4: 2.902, 8: 1.892, 16: 1.547, 32: 1.593, 64: 2.227, 128: 3.252},
}

#: The slices that its search found; microbatches are of one sequence.
FOUND = {
    "5": (704, 688, 656),
    "8": (384, 384, 368, 320, 296, 296),
    "9": (120,) * 4 + (112,) * 6 + (104,) * 8 + (64,),
}


@dataclass(frozen=True)
class Machine:
    """What the model of a machine needs; data sheets, not measurements.

    Attributes:
        flops: Half-precision operations per second of a GPU; what the paper takes as its peak.
        memory_bandwidth: Bytes per second of a GPU's memory (V100 data sheet).
        nvlink: Bytes per second that a GPU sends to others of its machine (V100 data sheet: 300 GB/s both
            ways).
        network: Bytes per second that a machine sends to others (AWS: 25 Gbit/s).
        gpus: GPUs of a machine.
    """

    flops: float = 112e12
    memory_bandwidth: float = 900e9
    nvlink: float = 150e9
    network: float = 25e9 / 8
    gpus: int = 8


P3_16XLARGE = Machine()
