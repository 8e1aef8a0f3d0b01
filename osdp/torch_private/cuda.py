"""CUDA: a kernel that does nothing for a while."""

import torch


def idle_kernel(cycles: int, device: torch.device) -> None:
    """Issue a kernel that touches no memory and takes ``cycles`` clock cycles of ``device``."""
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)
