"""Parameters that wrapping has replaced, for references that users still hold.

A plan stores parameters of its own: shards, or new objects with the same values. An optimizer that was
created before, a list of parameters for gradient clipping, or another model that shares a weight would go on
with the old ones, which are no longer trained. So under every plan all parameters are replaced, and the old
ones become :class:`ReplacedTensor`: their gradient is their successor's, and computing with them is an
error.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.nn.sliced_weight import LOCAL
from osdp.runtime.module.counted_dtensor import CHANGES
from osdp.runtime.module.parameter_owners import owned_parameters
from osdp.torch_private.autograd import gradient_hooks, share_gradient_hooks

#: The FQN of a parameter, and the parameter that is trained in its place on this rank, if any.
Successor = tuple[str, nn.Parameter | None]

#: Advice on where to create the optimizer, for messages.
MOVE = (
    "create the optimizer after wrapping, from the wrapped model's parameters: model = OSDP(model, ...); "
    "optimizer = torch.optim.AdamW(model.parameters(), ...)"
)

#: Methods allowed on a replaced parameter: their results are those of the whole successor.
_FACTS = frozenset(
    "size dim numel nelement element_size stride is_floating_point is_complex is_contiguous "
    "__len__ __hash__ __repr__ __format__".split()
)

#: Properties that return values.
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


class ReplacedTensor(torch.Tensor):
    """What a parameter becomes that is no longer the model's.

    Attributes:
        fqn: Its name in the model.
        successor: The parameter that is trained in its place; ``None`` on a rank that holds no part of it.
    """

    fqn: str
    successor: nn.Parameter | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Forward access to ``grad`` to the successor; raise for operations that need values."""
        mine = args[0] if args and isinstance(args[0], cls) else None
        method = func.__name__
        # Access to a property calls a method of its descriptor, such as __get__.
        descriptor = getattr(getattr(func, "__self__", None), "__name__", "")
        if mine is not None and descriptor == "grad":
            return mine._gradient(method, *args[1:])
        if mine is not None and (method in _FACTS or (method == "__get__" and descriptor not in _VALUES)):
            default: Any = super().__torch_function__
            return default(func, types, args, kwargs or {})
        used = next(_within(cls, [*args, *(kwargs or {}).values()]), None)
        raise cls._refused(descriptor or method, "" if used is None else used.fqn)

    @classmethod
    def _refused(cls, operation: str, fqn: str) -> RuntimeError:
        return RuntimeError(
            f"parameter{f' {fqn!r}' if fqn else ''} is no longer the model's: wrapping, or a switch to "
            f"another plan, has replaced it, and {operation} would compute with weights that are no longer "
            f"trained; {MOVE}"
        )

    def _gradient(self, access: str, *value: torch.Tensor | None) -> torch.Tensor | None:
        """Get, set or delete the gradient of the successor, by the name of the descriptor method."""
        if self.successor is None:
            return None
        if access == "__get__":
            return self.successor.grad
        self.successor.grad = value[0] if access == "__set__" else None
        return None


class ReplacedParameter(ReplacedTensor, nn.Parameter):
    """A plain parameter that was replaced."""


class ReplacedShards(ReplacedTensor, DTensor):
    """A sharded parameter of a plan that the model has left."""

    # Methods of DTensor, which are not functions of torch.

    def to_local(self, **_: Any) -> NoReturn:
        """Raise, as for all that needs values."""
        raise self._refused("to_local", self.fqn)

    def full_tensor(self, **_: Any) -> NoReturn:
        """Raise, as for all that needs values."""
        raise self._refused("full_tensor", self.fqn)

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, as for all that needs values."""
        raise self._refused("redistribute", self.fqn)


def _within(kind: type[ReplacedTensor], values: Sequence[Any]) -> Iterator[ReplacedTensor]:
    """The replaced parameters among arguments, also in lists, which foreach functions take."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _within(kind, value)


@dataclass(frozen=True, slots=True)
class _Plain:
    """Record of a parameter before wrapping, which does not keep it alive."""

    names: tuple[str, ...]
    reference: "weakref.ref[nn.Parameter]"
    attributes: dict[str, Any]
    hooks: tuple[Any, Any]


class PlainParameters:
    """The parameters of a plain model, recorded before it is wrapped.

    Args:
        model: The plain model.
        earlier: The parameters that these have replaced, if the model was wrapped before.
    """

    def __init__(self, model: nn.Module, earlier: "Replaced | None" = None) -> None:
        self._earlier = earlier or Replaced()
        self._leaves_plan = earlier is not None
        self._noted = [
            _Plain(owned.names, weakref.ref(parameter), _of_users(parameter), gradient_hooks(parameter))
            for owned in owned_parameters(model).values()
            for parameter in [owned.parameter]
        ]

    def replaced_by(self, stored: Mapping[str, nn.Parameter]) -> "Replaced":
        """Mark the parameters that are still referenced; users' attributes and hooks go to their successors.

        Their values are dropped: the successors have them already.

        Args:
            stored: The parameters that the optimizer sees from now on, by every FQN.
        """
        marked, others = self._earlier.succeeded_by(stored)
        for plain in self._noted:
            # A stage may contain only the later of two modules that share the parameter.
            name = next((name for name in plain.names if name in stored), plain.names[0])
            old, new = plain.reference(), stored.get(name)
            if new is old:
                continue
            if new is not None:
                for attribute, value in plain.attributes.items():
                    vars(new).setdefault(attribute, value)
                share_gradient_hooks(plain.hooks, new)
            # Those of a model that is tensor-parallel before it is wrapped are its own business.
            if type(old) is nn.Parameter or (self._leaves_plan and isinstance(old, DTensor)):
                kind: type[Any] = ReplacedParameter if type(old) is nn.Parameter else ReplacedShards
                _drop_values(old)
                old.__class__ = kind
                vars(old).update(fqn=name, successor=new)
                marked.append(weakref.ref(old))
            elif old is not None:
                others[id(old)] = (plain.reference, (name, new))
        return Replaced(others, marked)


def _drop_values(old: torch.Tensor) -> None:
    """Let go of the memory of ``old``, which nobody may read any more, whoever still refers to it.

    Tensors that share it, such as its successor or views that a user has made, keep it.
    """
    vars(old).pop(LOCAL, None)
    with torch.inference_mode(False), torch.no_grad():
        own = old._local_tensor if isinstance(old, DTensor) else old.detach()
        # Of the same shape, which may be asked for. A graph from before that still reads it must not go on
        # with numbers that look like weights.
        nothing = own.new_full((), math.nan if own.is_floating_point() else 0).expand(own.shape)
        if isinstance(old, DTensor):
            old._local_tensor = nothing
        else:
            old.data = nothing


def _of_users(parameter: nn.Parameter) -> dict[str, Any]:
    """The attributes of a parameter that no plan has set."""
    return {name: value for name, value in vars(parameter).items() if name not in (LOCAL, CHANGES)}


class Replaced:
    """Finds the successors of replaced parameters.

    Args:
        others: Replaced parameters of classes other than ``nn.Parameter``, such as tensor-parallel DTensors,
            by id.
        marked: The :class:`ReplacedTensor` ones.
    """

    def __init__(
        self,
        others: "Mapping[int, tuple[weakref.ref[nn.Parameter], Successor]] | None" = None,
        marked: "Sequence[weakref.ref[nn.Parameter]]" = (),
    ) -> None:
        self._others = dict(others or {})
        self._marked = tuple(marked)

    def let_go(self) -> None:
        """Keep no successor, which are about to be replaced themselves."""
        self.succeeded_by({})
        self._others = {key: (old, (name, None)) for key, (old, (name, _)) in self._others.items()}

    def succeeded_by(
        self, stored: Mapping[str, nn.Parameter]
    ) -> "tuple[list[weakref.ref[nn.Parameter]], dict[int, tuple[weakref.ref[nn.Parameter], Successor]]]":
        """Give them the successors ``stored``, by FQN; returns those that are still referenced."""
        marked = [reference for reference in self._marked if reference() is not None]
        for reference in marked:
            old = reference()
            if isinstance(old, ReplacedTensor):
                vars(old).update(successor=stored.get(old.fqn))
        others = {
            key: (reference, (name, stored.get(name)))
            for key, (reference, (name, _)) in self._others.items()
            if reference() is not None
        }
        return marked, others

    def exchange_in(
        self, optimizer: torch.optim.Optimizer, computing: "Mapping[int, Successor] | None" = None
    ) -> None:
        """Replace parameters in ``optimizer`` by their successors.

        Args:
            optimizer: The optimizer.
            computing: Stored parameters by the id of their compute parameters, which modules register between
                a forward and its backward: the optimizer may have been created with them then.

        Raises:
            RuntimeError: It has optimizer states of replaced parameters, which belong to whole parameters.
        """
        found: dict[int, Successor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                successor = self._successor(parameter) or (computing or {}).get(id(parameter))
                if successor is not None:
                    found[id(parameter)] = successor
        if not found:
            return
        names = [found[id(p)][0] for p, state in optimizer.state.items() if state and id(p) in found]
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise RuntimeError(
                f"this {type(optimizer).__name__} keeps states of parameters that wrapping, or a switch to "
                f"another plan, has replaced ({shown}). Before wrapping: {MOVE}, and load its states there, "
                "by osdp.runtime.checkpoint.load for example. Before a switch: name it there, "
                "model.switch(plan, [first, second])"
            )
        for group in optimizer.param_groups:
            now = [found.get(id(parameter), ("", parameter))[1] for parameter in group["params"]]
            group["params"][:] = [parameter for parameter in now if parameter is not None]

    def _successor(self, parameter: torch.Tensor) -> "Successor | None":
        if isinstance(parameter, ReplacedTensor):
            return parameter.fqn, parameter.successor
        reference, successor = self._others.get(id(parameter), (None, None))
        return successor if reference is not None and reference() is parameter else None
