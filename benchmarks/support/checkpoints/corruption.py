"""Changed bits and lost bytes in a checkpoint, one at a time."""

import random
from pathlib import Path

from osdp.errors import AlteredCheckpointError
from osdp.runtime import checkpoint

SEED = 20261123


def caught(folder: Path, count: int) -> tuple[int, list[str]]:
    """How many of ``count`` changes of the files in ``folder`` are refused, and those that are not.

    Nine of ten flip a bit, the others cut a file; the files are restored after each.
    """
    draw = random.Random(SEED)
    files = sorted(folder.iterdir())
    weights = [file.stat().st_size for file in files]
    found, missed = 0, []
    for number in range(count):
        # Half by size, half by file: the smallest are the manifest and the metadata.
        file = draw.choices(files, weights)[0] if number % 2 else draw.choice(files)
        content = file.read_bytes()
        at = draw.randrange(len(content))
        if number % 10:
            changed = bytearray(content)
            changed[at] ^= 1 << draw.randrange(8)
            file.write_bytes(changed)
        else:
            file.write_bytes(content[:at])
        try:
            checkpoint.verify(folder)
        except (AlteredCheckpointError, ValueError):
            found += 1
        else:
            missed.append(f"{file.name} at {at} of {len(content)}")
        file.write_bytes(content)
    return found, missed
