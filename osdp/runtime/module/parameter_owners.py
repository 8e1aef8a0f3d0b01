"""The modules that register each parameter, including tied parameters and shared modules."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from osdp.torch_private.modules import set_parameter


@dataclass(frozen=True, slots=True)
class ParameterSites:
    """All places where a model registers one parameter.

    Attributes:
        names: Its FQNs, in ``named_parameters`` order.
        places: The distinct modules that register it, each with its name in that module.
        aliases: The first FQN of each place; a shared module is one place with several FQNs.
    """

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    aliases: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first of its FQNs."""
        return self.names[0]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that is registered at present."""
        module, name = self.places[0]
        parameter = getattr(module, name)
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"{self.name} is no longer a parameter but a {type(parameter).__name__}")
        return parameter

    def register(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` in all places."""
        for module, name in self.places:
            set_parameter(module, name, parameter)


def owned_parameters(model: nn.Module) -> dict[str, ParameterSites]:
    """The parameters of ``model`` by their first FQN, in ``named_parameters`` order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    owned = [_owned(model, found) for found in names.values()]
    return {entry.name: entry for entry in owned}


def _owned(model: nn.Module, names: Iterable[str]) -> ParameterSites:
    names = tuple(names)
    places: dict[tuple[nn.Module, str], str] = {}
    for fqn in names:
        path, _, name = fqn.rpartition(".")
        places.setdefault((model.get_submodule(path), name), fqn)
    return ParameterSites(names, tuple(places), tuple(places.values()))
