"""Communicators between stages: on a backend without tags both sides must post in the same order."""

from collections import defaultdict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from osdp.runtime.pipeline.apply import PipelinedModel, ordered_channels
from osdp.runtime.pipeline.messenger import MessageKey, Messenger
from tests.helpers import distributed
from tests.helpers.stage_nets import batch, loss_fn, targets
from tests.runtime.pipeline.test_apply import SAMPLES, net, wrapped

Posted = dict[tuple[int, int], list[torch.Size]]


def with_channels(applied: PipelinedModel, group: dist.ProcessGroup) -> Any:
    placement = applied.plan.make_schedule().placement
    return ordered_channels(applied.plan, placement, group, applied._level)


def posts(schedule: str) -> tuple[Posted, Posted, float]:
    """What a rank sends and posts for on each channel, in order, in two steps of uneven microbatches."""
    sent: Posted = defaultdict(list)
    received: Posted = defaultdict(list)
    post_send, receive = Messenger._post_send, Messenger._receive

    def sends(mail: Messenger, tensor: torch.Tensor, peer: int, address: MessageKey, tag: int) -> None:
        assert address.channel in mail._channels
        sent[address.channel].append(tensor.shape)
        post_send(mail, tensor, peer, address, tag)

    def receives(
        mail: Messenger, buffer: torch.Tensor, peer: int, address: MessageKey, tag: int
    ) -> dist.Work:
        received[address.channel].append(buffer.shape)
        return receive(mail, buffer, peer, address, tag)

    with (
        mock.patch.object(PipelinedModel, "_channels", with_channels),
        mock.patch.object(Messenger, "_post_send", sends),
        mock.patch.object(Messenger, "_receive", receives),
    ):
        model = wrapped(net(), pp=dist.get_world_size(), schedule=schedule)
        for length in (5, 7):
            loss = model.train_step(batch(SAMPLES, length), targets(SAMPLES, length), loss_fn)
            for parameter in model.parameters():
                parameter.grad = None
    return dict(sent), dict(received), float(loss)


def all_posts() -> None:
    plain = wrapped(net(), pp=dist.get_world_size(), schedule="gpipe")
    want = float(plain.train_step(batch(SAMPLES, 7), targets(SAMPLES, 7), loss_fn))
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
        sent, received, loss = posts(schedule)
        assert abs(loss - want) < 1e-5 * want
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (sent, received))
        sends = {channel: shapes for mine, _ in ranks for channel, shapes in mine.items()}
        receives = {channel: shapes for _, mine in ranks for channel, shapes in mine.items()}
        assert sends and sends == receives, schedule


def test_both_sides_of_a_channel_post_in_the_same_order() -> None:
    distributed.run(2, all_posts, timeout=120)


def most_kept(num_microbatches: int, schedule: str) -> int:
    """The most messages that a rank keeps at a time, which may not have arrived."""
    most, post_send = 0, Messenger._post_send

    def sends(mail: Messenger, tensor: torch.Tensor, peer: int, address: MessageKey, tag: int) -> None:
        nonlocal most
        post_send(mail, tensor, peer, address, tag)
        most = max(most, len(mail._sent))

    model = wrapped(net(), pp=dist.get_world_size(), schedule=schedule)
    for _ in range(2):
        most = 0  # the first step sends headers, too
        with mock.patch.object(Messenger, "_post_send", sends):
            model.train_step(batch(16), targets(16), loss_fn, num_microbatches=num_microbatches)
        model.zero_grad()
    return most


def kept_by_few_and_by_many() -> None:
    for schedule in ("1f1b", "interleaved", "zb-h1"):
        few, many = (most_kept(count, schedule) for count in (4, 16))
        assert many <= few + 1, (schedule, few, many)


def test_what_has_arrived_is_let_go_of() -> None:
    """Gloo tells of no send that it is over: all messages of a step were kept to its end."""
    distributed.run(2, kept_by_few_and_by_many, timeout=120)
