"""The error for trainable parameters without a gradient, with ``find_unused_parameters=False``."""

from collections.abc import Sequence


def unused_error(names: Sequence[str]) -> RuntimeError:
    """The error to raise when the parameters ``names`` unexpectedly got no gradient."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return RuntimeError(
        f"{len(names)} trainable parameters got no gradient in this backward: {shown}. The gradients of this "
        "step count them as zero. If that is meant, leave find_unused_parameters=False out; otherwise use "
        "them in the loss or freeze them"
    )
