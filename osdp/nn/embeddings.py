"""Embeddings that no plan can train correctly."""

from torch import nn


def check_embeddings(model: nn.Module) -> None:
    """Raise if ``model`` has an embedding that would be wrong in every sharding mode.

    Raises:
        ValueError: An embedding writes to its weight in forward, or its gradient is sparse; lists them all.
    """
    faults = []
    for fqn, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        kind = f"{fqn or 'the root'} is an {type(module).__name__}"
        if module.max_norm is not None:
            faults.append(
                f"{kind}(max_norm={module.max_norm}), which rewrites rows it looks up: of a gathered copy, "
                "or on one rank alone. Build it without max_norm, and after each optimizer.step() scale the "
                "rows that are too long"
            )
        if module.sparse and module.weight.requires_grad:
            faults.append(
                f"{kind}(sparse=True), whose sparse gradient is not reduced over the ranks. Build it with "
                "sparse=False, and train it by a dense optimizer, such as Adam instead of SparseAdam"
            )
    if faults:
        raise ValueError("; ".join(faults))
