"""Models of transformers from their configurations alone: nothing is downloaded, no weights are made."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

#: GPT-2's published sizes: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019),
#: table 2. Head counts keep 64 channels a head, as in the released configurations.
GPT2_SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}


def causal_lm(name: str, overrides: Mapping[str, Any] | None = None) -> nn.Module:
    """A causal language model with its parameters on the meta device.

    Args:
        name: One of :data:`GPT2_SIZES`, or a ``model_type`` of transformers such as ``"llama"``.
        overrides: Fields of its configuration, for example ``{"num_hidden_layers": 4}``.

    Raises:
        ValueError: The model type or a field is unknown.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type = "gpt2" if name in GPT2_SIZES else name
    if model_type not in CONFIG_MAPPING:
        known = ", ".join(GPT2_SIZES)
        raise ValueError(f"unknown model {name!r}; write one of {known}, or a model_type of transformers")
    fields = {**GPT2_SIZES.get(name, {}), **(overrides or {})}
    config = CONFIG_MAPPING[model_type]()
    unknown = sorted(field for field in fields if not hasattr(config, field))
    if unknown:
        raise ValueError(f"{model_type} has no configuration field {', '.join(unknown)}")
    config = CONFIG_MAPPING[model_type](**{"use_cache": False, **fields})
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    # Where transformers knows no loss for a class it uses this one, with a warning.
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model


def token_batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    """A sample batch for :func:`causal_lm`: token ids and labels of shape ``(samples, length)``."""
    tokens = torch.zeros(samples, length, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}
