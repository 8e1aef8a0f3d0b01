"""Bytes of real text as training data: read, split, drawn in an order that a seed fixes."""

import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

#: Every tenth chunk is held out, so that both parts see every region of the corpus.
LARGEST_CHUNK = 2**16
HELD_OUT_EVERY = 10
#: The token that hides a byte, and how many tokens there are: bytes, this one and one for padding.
MASK, VOCABULARY = 256, 258
#: Label of positions that do not count.
IGNORED = -100
_NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", ".git", ".venv"}


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, apart from torch's memory.

    Attributes:
        source: Where it comes from.
        train: Bytes to train on.
        held_out: Bytes never trained on.
    """

    source: str
    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]

    @classmethod
    def read(cls, path: Path | None, max_bytes: int) -> "Corpus":
        """Read a file, all text files of a folder, or the Python standard library's own sources.

        Args:
            path: File or folder; ``None`` for the standard library.
            max_bytes: Read no more than this.

        Raises:
            FileNotFoundError: Nothing is there.
            ValueError: There is too little text to train on and to hold out from.
        """
        source = path or Path(sysconfig.get_path("stdlib"))
        if not source.exists():
            raise FileNotFoundError(f"there is no {source} to read text from")
        files = [source] if source.is_file() else _files(source, ".py" if path is None else "")
        text = _concatenate(files, max_bytes)
        chunk = min(LARGEST_CHUNK, len(text) // HELD_OUT_EVERY)
        if not chunk:
            raise ValueError(f"{source} holds {len(text)} bytes of text, which is too little to train on")
        held_out = np.arange(len(text)) // chunk % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        return cls(str(source), text[~held_out], text[held_out])

    @property
    def unigram_entropy(self) -> float:
        """Nats per held-out byte of the best guess that knows only how often each byte occurs in training."""
        counts = np.bincount(self.train, minlength=256) + 1
        return float(-np.log(counts / counts.sum())[self.held_out].mean())


def batch(text: NDArray[np.uint8], samples: int, length: int, *, seed: int, step: int) -> torch.Tensor:
    """The global batch of one step: ``(samples, length)`` int64, the same in every process."""
    if len(text) <= length:
        raise ValueError(f"samples of {length} bytes do not fit into {len(text)} bytes of text")
    starts = np.random.default_rng((seed, step)).integers(len(text) - length, size=samples)
    return torch.from_numpy(np.stack([text[start : start + length] for start in starts]).astype(np.int64))


def masked(tokens: torch.Tensor, *, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of which some are hidden, and labels of those alone, as BERT is trained (arXiv 1810.04805).

    Of 15 % chosen positions eight in ten become :data:`MASK`, one a random byte, and one stays. Every sample
    has as many as any other, so that means over processes are the mean over all positions.

    Args:
        tokens: The global batch of one step, of shape ``(samples, length)``.
        seed: Of the run.
        step: Its number.

    Returns:
        Inputs and labels of the same shape; labels of other positions are :data:`IGNORED`.
    """
    samples, length = tokens.shape
    draw = np.random.default_rng((seed, step, MASK))
    chosen = np.argsort(draw.random((samples, length)), axis=1)[:, : max(1, round(0.15 * length))]
    fate = draw.random(chosen.shape)
    given = np.take_along_axis(tokens.numpy(), chosen, axis=1)
    shown = np.where(fate < 0.8, MASK, np.where(fate < 0.9, draw.integers(256, size=chosen.shape), given))
    places = torch.from_numpy(chosen)
    inputs = tokens.scatter(1, places, torch.from_numpy(shown))
    return inputs, torch.full_like(tokens, IGNORED).scatter(1, places, torch.from_numpy(given))


def _files(top: Path, suffix: str) -> Iterator[Path]:
    """Files under ``top`` that end in ``suffix``, in an order that does not depend on the file system."""
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(set(folders) - _NOT_TEXT)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(suffix))


def _concatenate(files: Iterable[Path], max_bytes: int) -> NDArray[np.uint8]:
    parts: list[bytes] = []
    for path in takewhile(lambda _: sum(map(len, parts)) < max_bytes, files):
        content = path.read_bytes()
        if b"\0" not in content[:4096]:
            parts.append(content)
    return np.frombuffer(b"".join(parts)[:max_bytes], dtype=np.uint8)
