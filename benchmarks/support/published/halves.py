"""The half of the published rows that is set aside, by their names alone.

The cost model may be compared with the tuning half while it is changed. Of the other half only a summary is
looked at.
"""

import hashlib


def is_set_aside(name: str) -> bool:
    """Whether the row of this name is set aside: where the SHA-256 of its name is an odd number.

    >>> is_set_aside("a"), is_set_aside("c")
    (True, False)
    """
    return hashlib.sha256(name.encode()).digest()[-1] % 2 == 1
