"""Models of transformers as they are, from a few layers of many families to the shape of GPT-3."""

import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from osdp.tracing.trace import describe


def _language_model(kind: str, **sizes: Any) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind.split(':')[0]}Config")(**small, **sizes)
    ids = torch.ones(2, 8, dtype=torch.long)
    return getattr(transformers, kind.replace(":", ""))(config), {"input_ids": ids, "labels": ids}


_HIDDEN = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2}
FAMILIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": lambda: _language_model("GPT2:LMHeadModel", n_layer=3, n_embd=16, n_head=2, n_positions=8),
    "bert": lambda: _language_model("Bert:ForMaskedLM", **_HIDDEN, intermediate_size=32),
    "opt": lambda: _language_model("OPT:ForCausalLM", **_HIDDEN, ffn_dim=32, word_embed_proj_dim=16),
    "llama": lambda: _language_model("Llama:ForCausalLM", **_HIDDEN, intermediate_size=32),
    "t5": lambda: _language_model(
        "T5:ForConditionalGeneration", num_layers=3, d_model=16, num_heads=2, d_kv=8, d_ff=32,
        decoder_start_token_id=0,
    ),
    "vit": lambda: _image_model("ViT:ForImageClassification", **_HIDDEN, intermediate_size=32, patch_size=4),
    "resnet": lambda: _image_model(
        "ResNet:ForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 3]
    ),
}  # fmt: skip


def _image_model(kind: str, **sizes: Any) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind.split(':')[0]}Config")(**sizes)
    if hasattr(config, "image_size"):
        config.image_size = 8
    side = getattr(config, "image_size", 32)
    return getattr(transformers, kind.replace(":", ""))(config), {
        "pixel_values": torch.zeros(2, 3, side, side)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_unmodified_models_are_described(family: str) -> None:
    model, sample = FAMILIES[family]()
    desc = describe(model, sample)
    assert desc.batch_is_free
    assert desc.num_parameters == sum(p.numel() for p in model.parameters())
    names = [p.name for op in desc.operators for p in op.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    blocks = {op.block for op in desc.operators if op.block is not None}
    assert len(blocks) == {"t5": 6, "resnet": 5}.get(family, 3)
    assert blocks <= set(desc.modules)
    spans = [(op.first, op.last) for op in desc.operators if op.executed and not op.spanning]
    assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))
    assert sum(s.forward.live_bytes(2) + s.backward.live_bytes(2) for s in desc.segments) == 0


def test_the_shape_of_gpt3_takes_seconds_and_little_memory() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=96, n_embd=12288, n_head=96, n_positions=2048)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    desc = describe(model, {"input_ids": ids, "labels": ids})
    assert time.process_time() - start < 60
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2 * 2**30
    assert 174e9 < desc.num_parameters < 176e9
    assert len(desc.distinct_segments) < 30 < 96 < len(desc.segments)
