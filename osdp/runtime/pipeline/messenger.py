"""Asynchronous point-to-point messages between stages: activations and their gradients.

Receives are posted early: a backend such as gloo transfers nothing before. The first message of a kind is
preceded by a header with its shape and dtype; ranks remember them for each shape of the inputs, so later
messages need no header.
"""

import contextlib
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from osdp.runtime.pipeline.channels import Channel

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool,
    torch.int16, torch.int8, torch.uint8, torch.complex64, torch.complex128,
)  # fmt: skip
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class MessageKey:
    """Key of a message: its number, which both sides derive independently, and its kind.

    Attributes:
        number: Distinguishes the messages between two ranks that are in flight at the same time.
        kind: Equal for messages of the same shape and dtype.
        channel: The stages it goes from and to.
        made_at: Place of the action that makes it in the order of its rank.
        taken_at: Place of the action that takes it in the order of the other rank.
    """

    number: int
    kind: Hashable
    channel: Channel
    made_at: int = -1
    taken_at: float = math.inf


@dataclass(frozen=True, slots=True)
class _Expected:
    """A posted receive of a message, or of the header that precedes it."""

    buffer: torch.Tensor
    work: dist.Work
    is_header: bool


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message that may not have arrived yet: its tensor must live until then, and no longer."""

    tensor: torch.Tensor
    work: dist.Work
    peer: int
    taken_at: float


#: Shape and dtype of the messages of each kind.
MessageSpecs = dict[Hashable, tuple[torch.Size, torch.dtype]]


class FailedPeerError(RuntimeError):
    """Another rank has failed, and has nothing to send; it says itself why."""


class Messenger:
    """Messages between the ranks of a pipeline.

    Args:
        group: The ranks of one pipeline, in order; ``None`` if there is one.
        device: This rank's device.
        channels: The communicators of a backend that keeps messages in order (NCCL); empty where tags
            distinguish them.

    Attributes:
        specs: Shape and dtype of each kind of message so far, which need not be sent again. Where no data is
            transferred, as in a fake group, they must be filled in from a run with data.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        channels: Mapping[Channel, dist.ProcessGroup] | None = None,
    ) -> None:
        self._group = group
        self._channels = dict(channels or {})
        #: Channels with a header in flight: the message after it cannot be posted before its shape is known.
        self._headers: set[Channel] = set()
        self._device = device
        self.specs: MessageSpecs = {}
        self._asked: set[Hashable] = set()
        self._expected: dict[int, _Expected] = {}
        self._at_home: dict[int, torch.Tensor] = {}
        self._sent: list[_Sent] = []
        self._here = group.rank() if group is not None else 0
        #: Numbers of the messages of this step that were sent to other ranks, or taken from them.
        self._done: set[int] = set()

    def send(self, tensor: torch.Tensor, peer: int, address: MessageKey) -> None:
        """Start sending ``tensor``, which must not change meanwhile, to rank ``peer`` of the pipeline."""
        tensor = tensor.detach()
        if peer == self._here:
            self._at_home[address.number] = tensor
            return
        agreed = self.specs.get(address.kind)
        if agreed is not None and agreed != (tensor.shape, tensor.dtype):
            raise RuntimeError(
                f"a stage sends {tuple(tensor.shape)} {tensor.dtype} where it sent {tuple(agreed[0])} "
                f"{agreed[1]} for inputs of the same shapes: shapes and dtypes of what modules return must "
                "follow from those of the inputs, since other ranks do not receive them"
            )
        if agreed is None:
            header = _header(tensor, self._device)  # before anything is noted: it refuses some
            self.specs[address.kind] = (tensor.shape, tensor.dtype)
            self._post_send(header, peer, address, 2 * address.number)
        # Two tags for each number, of the header and of the message.
        self._post_send(tensor.contiguous(), peer, address, 2 * address.number + 1)
        self._done.add(address.number)

    def expect(self, peer: int, address: MessageKey) -> None:
        """Post the receive of a message from ``peer``, or of its header; a second call has no effect."""
        if peer == self._here or address.number in self._expected:
            return
        if address.channel in self._channels and address.channel in self._headers:
            return
        if address.kind in self.specs:
            self._expected[address.number] = self._posted(peer, address)
        elif address.kind not in self._asked:
            # Only the first message of a kind has a header.
            self._asked.add(address.kind)
            self._headers.add(address.channel)
            header = torch.empty(_MAX_DIMS + 2, dtype=torch.int64, device=self._device)
            work = self._receive(header, peer, address, 2 * address.number)
            self._expected[address.number] = _Expected(header, work, is_header=True)

    def take(self, peer: int, address: MessageKey) -> torch.Tensor:
        """Wait for the message from ``peer`` and return it; messages of one kind in the order of sending.

        Raises:
            FailedPeerError: That rank has failed before any message of the kind.
        """
        if peer == self._here:
            return self._at_home.pop(address.number)
        self.expect(peer, address)
        expected = self._expected.pop(address.number, None)
        # 1. After a header the shape is known, and the message itself can be received.
        if expected is not None and expected.is_header:
            expected.work.wait()
            self._headers.discard(address.channel)
            spec = _shape(expected.buffer)
            if spec is None:
                # The next message of the kind has a header again.
                self._asked.discard(address.kind)
                self._done.add(address.number)
                raise FailedPeerError(f"rank {peer} of the pipeline has failed in this step")
            self.specs[address.kind] = spec
            expected = None
        # 2. It was not posted ahead: a header of its kind or channel had to come first.
        if expected is None:
            expected = self._posted(peer, address)
        expected.work.wait()
        self._done.add(address.number)
        self._release(peer, address.made_at)
        return expected.buffer

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for sent in self._sent:
            sent.work.wait()
        self._sent.clear()
        self._done.clear()

    def pass_over(self, peer: int, address: MessageKey, *, sends: bool) -> None:
        """Exchange a message of an action that is not run, unless that was done before.

        What is received is dropped. What is sent are zeros; of a kind that was never sent, a header which
        says that nothing follows.
        """
        if peer == self._here or address.number in self._done:
            return
        if not sends:
            with contextlib.suppress(FailedPeerError):
                self.take(peer, address)
        elif address.kind in self.specs:
            shape, dtype = self.specs[address.kind]
            self.send(torch.zeros(shape, dtype=dtype, device=self._device), peer, address)
        else:
            self._post_send(_header(None, self._device), peer, address, 2 * address.number)
            self._done.add(address.number)

    def reset(self) -> None:
        """Forget all messages in flight, after an exception."""
        self._expected.clear()
        self._at_home.clear()
        self._headers.clear()
        self._sent.clear()
        self._done.clear()
        # What was asked for and never came is asked for again.
        self._asked.intersection_update(self.specs)

    def _posted(self, peer: int, address: MessageKey) -> _Expected:
        shape, dtype = self.specs[address.kind]
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        work = self._receive(buffer, peer, address, 2 * address.number + 1)
        return _Expected(buffer, work, is_header=False)

    def _receive(self, buffer: torch.Tensor, peer: int, address: MessageKey, tag: int) -> dist.Work:
        group = self._channels.get(address.channel, self._group)
        work = dist.irecv(buffer, self._global(peer), group=group, tag=tag)
        assert work is not None
        return work

    def _post_send(self, tensor: torch.Tensor, peer: int, address: MessageKey, tag: int) -> None:
        group = self._channels.get(address.channel, self._group)
        work = dist.isend(tensor, self._global(peer), group=group, tag=tag)
        assert work is not None
        self._sent = [sent for sent in self._sent if not sent.work.is_completed()]
        self._sent.append(_Sent(tensor, work, peer, address.taken_at))

    def _release(self, peer: int, place: int) -> None:
        """Let go of what ``peer`` had taken before it made a message that arrived; gloo tells of no send."""
        kept = []
        for sent in self._sent:
            if sent.peer == peer and sent.taken_at <= place:
                sent.work.wait()
            else:
                kept.append(sent)
        self._sent = kept

    def _global(self, peer: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, peer)


def _header(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The shape and dtype of a message; of ``None``, that there is none."""
    if tensor is None:
        return torch.full((_MAX_DIMS + 2,), -1, dtype=torch.int64, device=device)
    if tensor.dim() > _MAX_DIMS:
        raise ValueError(f"stages exchange tensors of at most {_MAX_DIMS} dimensions, got {tensor.dim()}")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"stages cannot exchange tensors of {tensor.dtype}")
    shape = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
    return torch.tensor([tensor.dim(), _DTYPES.index(tensor.dtype), *shape], device=device)


def _shape(header: torch.Tensor) -> tuple[torch.Size, torch.dtype] | None:
    """What :func:`_header` was made of."""
    dims, dtype, *shape = header.tolist()
    return None if dims < 0 else (torch.Size(shape[:dims]), _DTYPES[dtype])
