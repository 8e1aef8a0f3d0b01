"""The cache of transformers, slice by slice: each slice of a sequence has its own.

Layers are transformers' own, or fill one tensor for all slices (:mod:`osdp.integrations.stored_layer`). One
is copied before it takes what a slice adds, so that recomputation finds what the slice found. Layers of other
stages hold one channel of zeros, so that lengths, masks and positions come out as in the whole model.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from osdp.integrations.stored_layer import StoredLayer
from osdp.runtime.prefix import Pair


class SliceCache(DynamicCache):
    """What the layers of one stage hold while one slice goes through them.

    Args:
        layers: As earlier slices left them.
        past: Those of them that belong to this stage, by index.
    """

    def __init__(self, layers: Sequence[DynamicLayer], past: Mapping[int, Pair]) -> None:
        super().__init__()
        self.layers = list(layers)
        self.past = past
        self.added: dict[int, Pair] = {}
        self._before, self._after = tuple(layers), list(layers)

    @classmethod
    def of(cls, model: nn.Module) -> "Callable[..., SliceCache]":
        """Makes caches for ``model``, as they are before the first slice of a sequence of so many tokens.

        Raises:
            ValueError: Its layers keep something else than keys and values.
        """
        layers = _layers(model)

        return lambda length=0: cls(_stored(layers, length), {})

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword inputs of the model."""
        return {"past_key_values": self, "use_cache": True}

    @property
    def held(self) -> dict[int, Pair]:
        """What the next slice needs, by layer of this stage."""
        return {index: _pair(self._after[index]) for index in self.added}

    def followed(self, past: Mapping[int, Pair], length: int) -> "SliceCache":
        """The cache of the next slice, after one of ``length`` tokens."""
        layers = []
        for index, layer in enumerate(self._after):
            after = copy.copy(layer)
            if index in past:
                after.keys, after.values = past[index]
            else:
                nothing = torch.zeros(1, 1, length, 1)
                after.update(nothing, nothing)
            layers.append(after)
        return SliceCache(layers, past)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        """All keys and values that a layer attends to, those of this slice at the end."""
        layer = copy.copy(self._before[layer_idx])
        if isinstance(key_states, FakeTensor):
            # A module of another stage is asked for the shapes of what it returns.
            if layer.is_initialized:
                length = _pair(layer)[0].shape[-2]
                layer.keys, layer.values = _empty(key_states, length), _empty(value_states, length)
            return layer.update(key_states, value_states)
        found = layer.update(key_states, value_states)
        if layer_idx not in self.added:  # else it is computed again
            self._after[layer_idx] = self.layers[layer_idx] = layer
            self.added[layer_idx] = (key_states, value_states)
        return found


def empty_cache(config: Any, length: int) -> Any:
    """A cache for a model of this configuration and a sequence of ``length`` tokens."""
    cache: Any = DynamicCache(config=config)
    cache.layers = _stored(cache.layers, length)
    return cache


def _stored(layers: Sequence[DynamicLayer], length: int) -> list[DynamicLayer]:
    """New layers; those with a window stay transformers' own, which forget."""
    return [StoredLayer(length) if type(layer) is DynamicLayer else copy.copy(layer) for layer in layers]


def _pair(layer: DynamicLayer) -> Pair:
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


def _empty(states: torch.Tensor, length: int) -> torch.Tensor:
    return states.new_empty(*states.shape[:-2], length, states.shape[-1])


def _layers(model: Any) -> list[DynamicLayer]:
    layers = DynamicCache(config=model.config).layers
    known = [layer for layer in layers if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)]
    if len(known) < len(layers) or not layers:
        strange = sorted(
            {type(layer).__name__ for layer in layers} - {type(layer).__name__ for layer in known}
        )
        raise ValueError(
            f"{type(model).__name__} keeps more than keys and values from token to token "
            f"({', '.join(strange) or 'no layer is known'}): its sequences cannot be cut into slices"
        )
    return [layer for layer in known if isinstance(layer, DynamicLayer)]


def check_sliceable(model: nn.Module, *, trains: bool = True) -> None:
    """Refuse models whose sequences cannot be cut into slices.

    Args:
        model: The model.
        trains: Whether slices are trained on; otherwise tokens are generated one by one.

    Raises:
        ValueError: The model looks at later tokens, or has no cache of keys and values; says why.
    """
    config = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    both_ways = sorted({type(m).__name__ for m in model.modules() if getattr(m, "is_causal", None) is False})
    if not both_ways and getattr(_text_config(config), "is_causal", True) is False:
        both_ways = ["is_causal=False in its configuration"]
    if both_ways:
        reason = (
            f"its attention ({', '.join(both_ways)}) looks at later tokens too, so no slice can be computed "
            "before the ones after it"
        )
    elif getattr(config, "is_encoder_decoder", False):
        reason = "its decoder looks at all that its encoder made of the sequence"
    elif config is None or not {"past_key_values", "use_cache"} <= set(takes):
        reason = "its forward takes no past_key_values, so it has no cache as transformers' decoders have"
    elif trains and drops_cache(model):
        reason = (
            "its own checkpointing of activations drops the cache in training; turn that off and let the "
            "plan recompute (OSDP(recompute=True))"
        )
    else:
        return
    what = "cannot be cut into token slices" if trains else "cannot be generated token by token"
    instead = "train without token_slices" if trains else "use predict"
    raise ValueError(f"the sequences of {type(model).__name__} {what}: {reason}; {instead}")


def drops_cache(model: nn.Module) -> bool:
    """Whether transformers' own checkpointing is on, which drops the cache while it trains."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config
