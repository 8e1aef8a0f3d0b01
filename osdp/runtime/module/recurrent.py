"""Recurrent layers, whose weights cuDNN likes to have in one piece of memory.

In the first forward with other weights than before, and whenever a model asks for it, ``nn.LSTM`` and others
move their weights on a GPU into a buffer of their own (``flatten_parameters``). What a plan gathers or casts
goes to where the weights lay before: the layer would compute with those of its first forward for ever.
"""

from torch import nn


def keep_in_place(model: nn.Module) -> None:
    """Let no recurrent layer of ``model`` move its weights, which cuDNN copies in each call then."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _do_nothing  # type: ignore[method-assign]


def _do_nothing() -> None:
    """Stands for ``flatten_parameters``."""
