"""Plans of small models, searched from estimated profiles."""

from collections.abc import Callable

import pytest

from osdp import DeviceInfo, Link, ModelDesc, Plan, make_plan
from osdp.integrations.huggingface.models import language_model, token_batch

FIELDS = {
    "gpt2": {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 1000},
    "llama": {
        "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1000,
    },
}  # fmt: skip


def device(memory_limit: int = 2**34, ranks: int = 4, bandwidth: float = 1e9) -> DeviceInfo:
    """Ranks on one node whose collectives do not overlap."""
    links = tuple(
        Link(name, "world", ranks, 1e-5, bandwidth / (1 + (name == "all_reduce")))
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    )
    return DeviceInfo(
        memory_limit=memory_limit,
        kind="device",
        devices_per_node=ranks,
        links=links,
        flops=1e12,
        memory_bandwidth=1e11,
    )


@pytest.fixture(scope="session")
def planned() -> Callable[..., Plan]:
    """Plans of a model by name, under a fraction of the memory that replication takes."""
    descs: dict[str, ModelDesc] = {}

    def plan(name: str = "gpt2", fraction: float = 0.6, **options: object) -> Plan:
        if name not in descs:
            descs[name] = ModelDesc.from_module(language_model(name, FIELDS[name]), token_batch(2, 32))
        most = make_plan(None, descs[name], device(), strategy="NO_SHARD").predicted.peak_bytes
        return make_plan(None, descs[name], device(int(fraction * most)), **options)  # type: ignore[arg-type]

    return plan
