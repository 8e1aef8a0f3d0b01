"""DTensors that count their changes, to see that what was gathered from them is out of date.

Autograd's versions leave out changes of lists of DTensors (``torch._foreach_add_``, as optimizers make),
and those through ``.data`` and other views.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from osdp.runtime.module.group_dtensor import GroupDTensor, is_in_place, operands
from osdp.torch_private.optimizers import treat_in_lists


@dataclass(slots=True)
class Changes:
    """Number of changes of a DTensor and of its views."""

    count: int = 0


class CountedDTensor(GroupDTensor):
    """A DTensor whose changes are counted, whichever function makes them.

    Attributes:
        changes: Their number, shared with its views.
    """

    changes: Changes

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; count its operands as changed if it writes to any, else count its views with them."""
        kwargs = kwargs or {}
        found = super().__torch_function__(func, types, args, kwargs)
        changed = is_in_place(func.__name__) or "out" in kwargs
        if changed or type(found) is DTensor:
            for tensor in operands(args, kwargs):
                if isinstance(tensor, CountedDTensor):
                    if changed:
                        tensor.changes.count += 1
                    elif _memory_of(tensor) == _memory_of(found):
                        _count(found, tensor.changes)
        return found


def count_changes(tensor: Any) -> None:
    """Count the changes of a DTensor from now on, in its attribute ``changes``."""
    _count(tensor, Changes())


def _count(tensor: Any, changes: Changes) -> None:
    tensor.__class__ = CountedDTensor
    tensor.changes = changes


def _memory_of(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


treat_in_lists(CountedDTensor)
