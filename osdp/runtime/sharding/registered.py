"""The check that modules still register the plan's parameters when a forward begins.

Parameters that were assigned after wrapping (``module.weight = nn.Parameter(...)``, weights tied late,
``torch.func.functional_call`` with other values) would be overwritten at the next gather in one mode, and
computed with, untrained, in another. So they are an error in every mode.
"""

from collections.abc import Iterable, Sequence

from osdp.runtime.sharding.fsdp_units import ShardedParameter, ShardedUnit
from osdp.runtime.sharding.replicated import ReplicatedParameter
from osdp.runtime.sharding.sliced import SlicedParameter
from osdp.torch_private.fsdp import unsharded_parameters
from osdp.torch_private.modules import registered_parameter

Parameter = ReplicatedParameter | ShardedParameter | SlicedParameter


def check_registered(parameters: Iterable[Parameter], units: Sequence[ShardedUnit]) -> None:
    """Raise if a module registers a parameter that is not the plan's.

    Args:
        parameters: The parameters of the plan.
        units: Its sharded units, which sharded parameters index.

    Raises:
        RuntimeError: A module has another parameter, or none, under one of their names.
    """
    for parameter in parameters:
        for module, name in parameter.owned.places:
            found = registered_parameter(module, name)
            if found is parameter.stored or (found is not None and found is parameter.compute):
                continue
            if found is not None and any(found is whole for whole in _wholes(parameter, units)):
                continue
            raise RuntimeError(
                f"{parameter.name!r} is no longer the parameter that was wrapped: something else was put in "
                "its place, by an assignment, a late tie or torch.func.functional_call, that no plan trains. "
                "Do that before wrapping, or change values in place: with torch.no_grad(): "
                "parameter.copy_(...)"
            )


def _wholes(parameter: Parameter, units: Sequence[ShardedUnit]) -> list[object]:
    """The tensors that may be registered for ``parameter`` while it is gathered, besides ``compute``."""
    if isinstance(parameter, ShardedParameter):
        pairs = unsharded_parameters(units[parameter.unit].group)
        return [whole for stored, whole in pairs if stored is parameter.stored]
    return [parameter.whole] if isinstance(parameter, SlicedParameter) else []
