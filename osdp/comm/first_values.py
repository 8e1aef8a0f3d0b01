"""The values of the first rank, on all ranks."""

import torch
import torch.distributed as dist


def broadcast_values(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Give ``tensor`` the values of the first rank of ``group``, however it lies in memory on each of them.

    Of a tensor that is not contiguous gloo takes, and fills, as many elements as it has from where it begins,
    whatever they are (torch 2.13, pytorch/pytorch#192920), and NCCL refuses it.
    """
    if tensor.is_contiguous():
        dist.broadcast(tensor, group=group, group_src=0)
        return
    with torch.no_grad():
        sent = tensor.contiguous()
        dist.broadcast(sent, group=group, group_src=0)
        for dim, stride in enumerate(tensor.stride()):
            if not stride and tensor.shape[dim]:  # expanded: one element stands for all
                tensor, sent = tensor.narrow(dim, 0, 1), sent.narrow(dim, 0, 1)
        tensor.copy_(sent)
