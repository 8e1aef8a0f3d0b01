"""Models of transformers: from configurations alone, their losses, and slices of their sequences.

Start at :func:`language_model` and :func:`with_head_loss`.

- ``models``: models by name, their losses, the loss computed by the head
- ``shaped_models``: the model that a TransformerShape describes
- ``decoder_stage``: decoder layers as one stage of a pipeline
- ``slice_cache``: the key-value cache of each slice
- ``stored_layer``: a cache layer in one tensor for keys and one for values
- ``token_loss``: losses of slices
- ``trainer``: the Trainer of transformers
- ``token_step``: what ``train_step`` needs to cut sequences into slices
"""

from osdp.integrations.huggingface.models import (
    GPT2_SIZES,
    HEAD_LOSS_MODELS,
    HeadLossModel,
    causal_lm,
    causal_lm_loss,
    language_model,
    masked_lm_loss,
    token_batch,
    with_head_loss,
)

__all__ = [
    "GPT2_SIZES",
    "HEAD_LOSS_MODELS",
    "HeadLossModel",
    "causal_lm",
    "causal_lm_loss",
    "language_model",
    "masked_lm_loss",
    "token_batch",
    "with_head_loss",
]
