"""Parameters that got no gradient in a backward, where that is not meant."""

from collections.abc import Sequence


def unused_error(names: Sequence[str]) -> RuntimeError:
    """What to raise when ``names`` got no gradient and that was not to happen."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return RuntimeError(
        f"{len(names)} trainable parameters got no gradient in this backward: {shown}. The gradients of this "
        "step count them as zero. If that is meant, leave find_unused_parameters=False out; otherwise use "
        "them in the loss or freeze them"
    )
