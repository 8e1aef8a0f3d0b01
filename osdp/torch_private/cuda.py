"""CUDA: a kernel that does nothing for a while."""

import torch


def idle_kernel(cycles: int) -> None:
    """Issue a kernel that touches no memory and takes ``cycles`` clock cycles of the current device."""
    torch.cuda._sleep(cycles)
