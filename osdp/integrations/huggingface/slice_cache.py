"""SliceCache: a key-value cache of transformers for token slices; each slice of a sequence has its own.

Its layers are transformers' own, or fill one tensor for all slices
(:mod:`osdp.integrations.huggingface.stored_layer`). A layer is copied before a slice appends to it, so that
recomputation starts from the same cache as the first forward of the slice. Layers of other pipeline stages
hold one channel of zeros, so that lengths, masks and positions are the same as in the whole model.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from osdp.integrations.huggingface.stored_layer import StoredLayer
from osdp.runtime.token_slices.kv_prefix import Pair

#: What decoders called their cache before transformers 5.24, and what they call it since.
CACHE_ARGUMENTS = ("past_key_values", "cache")


class SliceCache(DynamicCache):
    """Keys and values in the layers of one stage while one slice goes through them.

    Args:
        layers: The layers as earlier slices left them.
        past: Keys and values of the layers that belong to this stage, by index.
        name: Argument of the model's forward that takes a cache.
    """

    def __init__(self, layers: Sequence[DynamicLayer], past: Mapping[int, Pair], name: str) -> None:
        super().__init__()
        self.name = name
        self.layers = list(layers)
        self.past = past
        self.added: dict[int, Pair] = {}
        self._before, self._after = tuple(layers), list(layers)

    @classmethod
    def of(cls, model: nn.Module) -> "Callable[..., SliceCache]":
        """Make a function that returns an empty cache of ``model`` for a sequence of ``length`` tokens.

        :func:`check_sliceable` must have passed the model.
        """
        config: Any = model.config
        cache: Any = DynamicCache(config=config)
        layers, name = cache.layers, cache_argument(model)
        assert name is not None  # check_sliceable refuses such models

        return lambda length=0: cls(_stored(layers, length), {}, name)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments with which the model uses this cache."""
        return {self.name: self, "use_cache": True}

    @property
    def held(self) -> dict[int, Pair]:
        """Keys and values that the next slice needs, by layer of this stage."""
        return {index: _pair(self._after[index]) for index in self.added}

    def next_cache(self, past: Mapping[int, Pair], length: int) -> "SliceCache":
        """The cache of the next slice, after one of ``length`` tokens."""
        # The forward has ended: a module that is recomputed is to find the cache as long as it was before.
        self.layers = list(self._before)
        layers = []
        for index, layer in enumerate(self._after):
            after = copy.copy(layer)
            if index in past:
                after.keys, after.values = past[index]
            else:
                nothing = torch.zeros(1, 1, length, 1)
                after.update(nothing, nothing)
            layers.append(after)
        return SliceCache(layers, past, self.name)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        """Append keys and values of this slice; returns all that the layer attends to, this slice's last."""
        layer = copy.copy(self._before[layer_idx])
        if isinstance(key_states, FakeTensor):
            # A module of another stage runs on fake tensors, only to determine the shapes of its outputs.
            if layer.is_initialized:
                length = _pair(layer)[0].shape[-2]
                layer.keys, layer.values = _empty(key_states, length), _empty(value_states, length)
            return layer.update(key_states, value_states)
        found = layer.update(key_states, value_states)
        if layer_idx not in self.added:  # else it is a recomputation, which must not change the cache
            self._after[layer_idx] = self.layers[layer_idx] = layer
            self.added[layer_idx] = (key_states, value_states)
        return found


def cache_argument(model: nn.Module) -> str | None:
    """The argument of the model's forward that takes a key-value cache, if it takes ``use_cache``, too."""
    takes = inspect.signature(model.forward).parameters
    found = [name for name in CACHE_ARGUMENTS if name in takes]
    return found[0] if found and "use_cache" in takes else None


def empty_cache(config: Any, length: int) -> Any:
    """Make an empty cache for a model of this configuration and a sequence of ``length`` tokens."""
    cache: Any = DynamicCache(config=config)
    cache.layers = _stored(cache.layers, length)
    return cache


def _stored(layers: Sequence[DynamicLayer], length: int) -> list[DynamicLayer]:
    """New layers; those with a sliding window stay transformers' own, which drop old tokens."""
    return [StoredLayer(length) if type(layer) is DynamicLayer else copy.copy(layer) for layer in layers]


def _pair(layer: DynamicLayer) -> Pair:
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


def _empty(states: torch.Tensor, length: int) -> torch.Tensor:
    return states.new_empty(*states.shape[:-2], length, states.shape[-1])


def _strange_layers(config: Any) -> list[str]:
    """Kinds of a model's cache layers that hold something other than keys and values."""
    cache: Any = DynamicCache(config=config)
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    strange = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in known})
    return strange if cache.layers else ["no layer is known"]


def check_sliceable(model: nn.Module, *, trains: bool = True) -> None:
    """Check that the sequences of a model can be cut into slices.

    Args:
        model: The model.
        trains: Whether slices are trained on; otherwise tokens are generated one by one.

    Raises:
        ValueError: The model attends to later tokens, has no key-value cache, or caches something else, too;
            the message says which.
    """
    config = getattr(model, "config", None)
    both_ways = sorted({type(m).__name__ for m in model.modules() if getattr(m, "is_causal", None) is False})
    if not both_ways and getattr(_text_config(config), "is_causal", True) is False:
        both_ways = ["is_causal=False in its configuration"]
    if both_ways:
        reason = (
            f"its attention ({', '.join(both_ways)}) attends to later tokens, too, so no slice can be "
            "computed before the ones after it"
        )
    elif getattr(config, "is_encoder_decoder", False):
        reason = "its decoder attends to the encoder's output for the whole sequence"
    elif config is None or cache_argument(model) is None:
        takes = " or ".join(CACHE_ARGUMENTS)
        reason = f"its forward takes no {takes} and use_cache, so it has no cache like transformers' decoders"
    elif strange := _strange_layers(config):
        reason = f"it caches more than keys and values from token to token ({', '.join(strange)})"
    elif trains and drops_cache(model):
        reason = (
            "its own activation checkpointing drops the cache in training; turn that off and let the plan "
            "recompute (OSDP(recompute=True))"
        )
    else:
        return
    what = "cannot be cut into token slices" if trains else "cannot be generated token by token"
    instead = "train without token_slices" if trains else "use predict"
    if not trains and hasattr(model, "generate"):
        instead += ", or the model's own generate(input_ids=), for which it must be whole"
    raise ValueError(f"the sequences of {type(model).__name__} {what}: {reason}; {instead}")


def drops_cache(model: nn.Module) -> bool:
    """Whether transformers' own activation checkpointing is on, which drops the cache in training."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config
