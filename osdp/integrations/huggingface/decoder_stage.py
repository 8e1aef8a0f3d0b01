"""Pipeline stage of transformers' decoder layers, to be measured slice by slice."""

from collections.abc import Mapping
from typing import Any

import torch

from osdp.integrations.huggingface.models import causal_lm
from osdp.profiler.token_latency import DecoderStage


def decoder_stage(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    num_layers: int = 1,
    length: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DecoderStage:
    """Make a stage of the first layers of a causal language model and its final norm, with random weights.

    Args:
        name: As for :func:`osdp.integrations.huggingface.causal_lm`.
        overrides: Fields of its configuration.
        num_layers: Number of layers.
        length: Tokens of the longest sequence to be measured, if known.
        device: Device of the stage.
        dtype: Dtype of its parameters.

    Raises:
        ValueError: The model type or a field is unknown, the model has fewer layers or shorter sequences, or
            its sequences cannot be cut into slices.
    """
    from transformers import AutoModel

    from osdp.integrations.huggingface.slice_cache import cache_argument, check_sliceable, empty_cache

    # The model itself stays on the meta device; only its configuration is used.
    config: Any = causal_lm(name, overrides).config
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise ValueError(
            f"a stage cannot have {num_layers} layers of {name}, which has {config.num_hidden_layers}; 1 to "
            f"{config.num_hidden_layers} are possible"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if length is not None and longest is not None and length > longest:
        raise ValueError(
            f"{name} takes sequences of up to {longest} tokens, not {length}; override the field of its "
            "configuration that limits it (n_positions, max_position_embeddings)"
        )
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    # Inputs are hidden states, so the embedding is never used: make it as small as possible.
    config.vocab_size = 1 + (config.pad_token_id or 0)
    with torch.device(device):
        module = AutoModel.from_config(config).to(dtype).train()
    check_sliceable(module)
    cache = cache_argument(module)
    assert cache is not None  # checked
    width = config.hidden_size
    described = f"{num_layers} layers of {name} with {width} channels"
    return DecoderStage(described, module, cache, lambda: empty_cache(config, length or 0), num_layers, width)
