"""Models of transformers, made from their configurations alone, and their losses."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from osdp.nn.modules import LMHeadLoss
from osdp.torch_private.modules import share_registries

#: GPT-2's published sizes: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019),
#: table 2. Head counts keep 64 channels a head, as in the released configurations.
GPT2_SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}

#: Model types whose logits are the unchanged outputs of their head; others scale or cap them.
HEAD_LOSS_MODELS = ("gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3")


def language_model(
    name: str, overrides: Mapping[str, Any] | None = None, published: Mapping[str, Any] | None = None
) -> nn.Module:
    """Make a language model with its parameters on the meta device.

    An encoder-decoder if the configuration specifies one, a masked language model for encoders such as BERT,
    else a causal one.

    Args:
        name: One of :data:`GPT2_SIZES`, or a ``model_type`` of transformers such as ``"llama"``.
        overrides: Fields of its configuration, for example ``{"num_hidden_layers": 4}``.
        published: A configuration that transformers wrote, in any version: it knows what to do with fields
            that its class no longer has. Its ``use_cache``, which is for generation, does not count.

    Raises:
        ValueError: The model type, or a field in ``overrides``, is unknown.
    """
    from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = _config(name, overrides, published)
    if config.is_encoder_decoder:
        if getattr(config, "decoder_start_token_id", None) is None:
            # Configurations of released T5 models start targets with padding; the class has no default.
            config.decoder_start_token_id = config.pad_token_id
        return _on_meta(AutoModelForSeq2SeqLM, config)
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return _on_meta(AutoModelForMaskedLM, config)
    return _causal(config)


def causal_lm(name: str, overrides: Mapping[str, Any] | None = None) -> nn.Module:
    """Make a causal language model on the meta device; see :func:`language_model`."""
    return _causal(_config(name, overrides))


def _config(
    name: str, overrides: Mapping[str, Any] | None, published: Mapping[str, Any] | None = None
) -> Any:
    from transformers import CONFIG_MAPPING

    model_type = "gpt2" if name in GPT2_SIZES else name
    if model_type not in CONFIG_MAPPING:
        known = ", ".join(GPT2_SIZES)
        raise ValueError(f"unknown model {name!r}; write one of {known}, or a model_type of transformers")
    published = published or {}
    overrides = overrides or {}
    fields = {**GPT2_SIZES.get(name, {}), **published, **overrides}
    config = CONFIG_MAPPING[model_type]()
    kept = {"decoder_start_token_id", *published}
    unknown = sorted(field for field in fields if not hasattr(config, field) and field not in kept)
    if unknown:
        raise ValueError(f"{model_type} has no configuration field {', '.join(unknown)}")
    return CONFIG_MAPPING[model_type](**{**fields, "use_cache": overrides.get("use_cache", False)})


def _causal(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model = _on_meta(AutoModelForCausalLM, config)
    # transformers uses this loss anyway for classes without a known one, but with a warning.
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model


def _on_meta(auto: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        # A published configuration may name a class on the hub, whose code would be run.
        model: nn.Module = auto.from_config(config, trust_remote_code=False)
    return model


def token_batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    """Make a sample batch for :func:`language_model`: token ids and labels of shape ``(samples, length)``."""
    tokens = torch.zeros(samples, length, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def causal_lm_loss(
    output: Any, labels: torch.Tensor, *, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of a causal language model, as the sum over counted labels and their number.

    Use it in ``model.train_step(inputs, labels, causal_lm_loss)``: padding, ignored labels and microbatches
    of unequal size then have the right weight.

    Args:
        output: The model's output, or its logits of shape ``(samples, length, vocabulary)``.
        labels: Token ids of shape ``(samples, length)``; each position predicts the label of the next one.
        ignore_index: Label of positions that do not count.

    Returns:
        The sum in nats, in float32 or a wider dtype, and the number of labels that count.

    Raises:
        ValueError: The shapes of logits and labels differ.

    >>> logits = torch.zeros(1, 3, 4)
    >>> total, count = causal_lm_loss(logits, torch.tensor([[1, 2, -100]]))
    >>> round(total.item(), 4), count.item()  # of the first position alone: log 4
    (1.3863, 1)
    """
    logits = _logits(output, labels)
    return _sum_and_count(logits[:, :-1], labels[:, 1:], ignore_index)


def masked_lm_loss(
    output: Any, labels: torch.Tensor, *, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`causal_lm_loss`, for models whose positions predict their own labels, such as BERT."""
    return _sum_and_count(_logits(output, labels), labels, ignore_index)


def _logits(output: Any, labels: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    if logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need labels of shape {tuple(logits.shape[:2])}, got "
            f"{tuple(labels.shape)}"
        )
    return logits


def _sum_and_count(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    flat = labels.flatten().to(logits.device)
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    total = nn.functional.cross_entropy(wide, flat, ignore_index=ignore_index, reduction="sum")
    return total, (flat != ignore_index).sum()


class HeadLossModel(nn.Module):
    """A causal language model whose head computes the loss, so that the full logits never exist.

    It registers the same parameters, buffers and modules as the model, under the same names; methods and
    attributes are the model's own. Made by :func:`with_head_loss`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        share_registries(self, model)
        # Not registered as a submodule, which would list every parameter a second time.
        self.__dict__["model_with_logits"] = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model_with_logits" not in self.__dict__:
                raise
            return getattr(self.__dict__["model_with_logits"], name)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **inputs: Any,
    ) -> Any:
        """Compute the loss of ``labels``, which are shifted here, as a ``CausalLMOutput``."""
        from transformers.modeling_outputs import CausalLMOutput

        if labels is None:
            raise ValueError("labels are needed: a head that computes the loss returns no logits")
        head: LMHeadLoss = self.get_output_embeddings()
        states = self.base_model(input_ids=input_ids, **{**inputs, "return_dict": True}).last_hidden_state
        shifted = nn.functional.pad(labels, (0, 1), value=head.ignore_index)[..., 1:]
        total, count = head(states, shifted)
        return CausalLMOutput(loss=total / (count if num_items_in_batch is None else num_items_in_batch))


def with_head_loss(model: nn.Module, *, num_slices: int = 8) -> HeadLossModel:
    """Make a causal language model compute its loss in slices of the vocabulary.

    Its head becomes an :class:`osdp.LMHeadLoss` under the same name; parameters, including tied ones, and the
    keys of the state dict do not change. It needs ``labels`` and returns a loss, but no logits.

    Args:
        model: A model of transformers; its head is replaced in place. Wrap the result, not the model.
        num_slices: Number of slices.

    Raises:
        ValueError: It is not a causal language model of a type in :data:`HEAD_LOSS_MODELS`, its head has a
            bias or computes the loss already, or its vocabulary is smaller than ``num_slices``.
    """
    kind = getattr(getattr(model, "config", None), "model_type", "")
    suits = kind in HEAD_LOSS_MODELS and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    head: Any = model.get_output_embeddings() if suits else None  # type: ignore[operator]
    if isinstance(model, HeadLossModel) or isinstance(head, LMHeadLoss):
        raise ValueError("the head of this model computes the loss already; use the model as it is")
    if head is None:
        raise ValueError(
            f"a {type(model).__name__} is not known to compute its logits by its head alone; causal language "
            f"models of {', '.join(HEAD_LOSS_MODELS)} do. Use osdp.LMHeadLoss in a model of your own"
        )
    model.set_output_embeddings(LMHeadLoss(head, num_slices=num_slices))  # type: ignore[operator]
    return HeadLossModel(model)
