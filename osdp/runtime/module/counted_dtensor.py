"""DTensors that count their changes, to see that what was gathered from them is out of date.

Autograd's versions leave out changes of lists of DTensors (``torch._foreach_add_``, as optimizers make),
and those through ``.data`` and other views.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from osdp.runtime.module.group_dtensor import GroupDTensor, is_in_place, memory_of, operands
from osdp.torch_private.autograd import version_of
from osdp.torch_private.compiling import not_compiled
from osdp.torch_private.dtensor import data_pointer
from osdp.torch_private.optimizers import treat_in_lists

#: The attribute of a DTensor that counts its changes.
CHANGES = "changes"


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
    @not_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; count changes of what it writes to, and those of its views from now on."""
        kwargs = kwargs or {}
        found = super().__torch_function__(func, types, args, kwargs)
        for tensor in operands(_written(func.__name__, args, kwargs), {}):
            if isinstance(tensor, CountedDTensor):
                tensor.changes.count += 1
        views = [view for view in operands((found,), {}) if type(view) in (DTensor, GroupDTensor)]
        if views:
            for tensor in operands(args, kwargs):
                if isinstance(tensor, CountedDTensor):
                    for view in views:
                        _count_view(view, tensor)
        return found

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        """As DTensor's, for compiled code, which compares types."""
        whole: Any = DTensor.__tensor_unflatten__(*args)
        count_changes(whole)
        return whole

    def _plain(self) -> DTensor:
        # The storage of its local part is that of the whole parameter.
        plain = DTensor(self._local_tensor.clone(), self._spec, requires_grad=self.requires_grad)
        vars(plain).update({name: value for name, value in vars(self).items() if name != CHANGES})
        return plain


def count_changes(tensor: Any) -> None:
    """Count the changes of a DTensor from now on, in its attribute :data:`CHANGES`."""
    _count(tensor, Changes())


def change_of(tensor: Any) -> tuple[object, ...]:
    """What differs after every change of a DTensor that is counted, or of its storage."""
    counted = getattr(tensor, CHANGES, None)
    return None if counted is None else counted.count, version_of(tensor), data_pointer(tensor)


def _count(tensor: Any, changes: Changes) -> None:
    tensor.__class__ = CountedDTensor
    tensor.changes = changes


def _count_view(view: Any, tensor: Any) -> None:
    if isinstance(view._local_tensor, FakeTensor):  # while a step is compiled: it has no memory
        return
    if memory_of(view) == memory_of(tensor):
        _count(view, tensor.changes)
        own, local = view._local_tensor, tensor._local_tensor
        if (own.data_ptr(), own.shape, own.stride()) == (local.data_ptr(), local.shape, local.stride()):
            # Whoever writes to the local part of this view, as torch.distributed.checkpoint does to what a
            # state dict holds, raises the version of the tensor's own.
            view._local_tensor = local


def _written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """The operands that a function called ``name`` writes to."""
    if "_fused_" in name:
        return args
    return (*args[: is_in_place(name)], kwargs.get("out"))


treat_in_lists(CountedDTensor)
