"""Bytes of a text, in batches that depend on the step alone: however many ranks share a batch."""

from pathlib import Path

import torch

LENGTH = 64


class Text:
    """A text as sequences of bytes.

    Args:
        path: A file.
        samples: Samples of all ranks in a step.
    """

    def __init__(self, path: Path, samples: int) -> None:
        self._bytes = torch.tensor(list(path.read_bytes()), dtype=torch.int64)
        self._samples = samples

    def batch(self, step: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
        """The samples of ``rank`` in a step; ``ranks`` share all of them evenly."""
        first = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self._bytes) - LENGTH, (self._samples,), generator=first)
        share = self._samples // ranks
        mine = starts[rank * share : (rank + 1) * share]
        tokens = torch.stack([self._bytes[at : at + LENGTH] for at in mine.tolist()])  # (samples, LENGTH)
        return {"input_ids": tokens, "labels": tokens}
