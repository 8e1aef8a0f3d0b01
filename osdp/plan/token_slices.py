"""TokenSlices: a sequence cut into contiguous slices, several of which are in a pipeline at a time.

The tokens of a causal model do not depend on later ones: a stage can start on the next slice while the stage
after it works on this one (TeraPipe, Li et al., ICML 2021).
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from osdp.plan.shard_math import part_sizes


@dataclass(frozen=True, slots=True)
class TokenSlices:
    """Token slices of every sequence of a step.

    Attributes:
        lengths: Tokens of each slice, in the order of the sequence.

    Raises:
        ValueError: There is no slice, or a slice has no tokens.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(
                f"a sequence cannot be cut into slices of {list(self.lengths)} tokens: at least one slice is "
                "needed, and each has at least one token"
            )

    @classmethod
    def uniform(cls, length: int, num_slices: int, multiple_of: int = 1) -> "TokenSlices":
        """Slices as equal as possible, the longer ones first.

        Args:
            length: Tokens of the sequence.
            num_slices: Number of slices.
            multiple_of: All slices but the last are multiples of this number of tokens; the last slice takes
                the remainder.

        Raises:
            ValueError: There are more slices than (multiples of) tokens, or none.

        >>> TokenSlices.uniform(10, 4).lengths
        (3, 3, 2, 2)
        >>> TokenSlices.uniform(30, 3, multiple_of=8).lengths
        (16, 8, 6)
        """
        if multiple_of < 1:
            raise ValueError(f"multiple_of must be at least 1 token, got {multiple_of}")
        steps = -(-length // multiple_of)
        if not 1 <= num_slices <= steps:
            of = f" of multiples of {multiple_of}" if multiple_of > 1 else ""
            raise ValueError(
                f"a sequence of {length} tokens cannot be cut into {num_slices} slices{of}; 1 to {steps} are "
                "possible"
            )
        lengths = [multiple_of * size for size in part_sizes(steps, num_slices)]
        lengths[-1] -= multiple_of * steps - length
        return cls(tuple(lengths))

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return len(self.lengths)

    @property
    def sequence_length(self) -> int:
        """Tokens of all slices together."""
        return sum(self.lengths)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each slice.

        >>> TokenSlices((3, 2, 5)).bounds
        ((0, 3), (3, 5), (5, 10))
        """
        return tuple(pairwise(accumulate(self.lengths, initial=0)))

    def check(self, sequence_length: int) -> None:
        """Check that the slices add up to ``sequence_length`` tokens.

        Raises:
            ValueError: They do not.
        """
        if self.sequence_length != sequence_length:
            raise ValueError(
                f"the token slices {list(self.lengths)} add up to {self.sequence_length} tokens, and the "
                f"sequence has {sequence_length}; give lengths that add up to it, or a number of slices"
            )
