"""What is given beside a finished plan or a finished profile is what they were made for, or is refused."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from osdp import OSDP, DeviceInfo, Link, ModelDesc, PlanMismatchError, Profile, Training, make_plan
from osdp.hardware.device_info import COLLECTIVES
from osdp.inputs import resolve_description
from osdp.profiler.roofline import estimate
from tests.helpers.distributed import run
from tests.helpers.nets import Net, WithLoss, tokens
from tests.runtime.optimizer.test_check import Records

LIMIT = 2**28


def devices(**options: Any) -> DeviceInfo:
    links = tuple(Link(name, "world", 2, 1e-5, 1e9) for name in COLLECTIVES)
    speeds = {"flops": 1e9, "memory_bandwidth": 1e9}
    return DeviceInfo(**{"memory_limit": LIMIT, "devices_per_node": 2, "links": links, **speeds, **options})


def net() -> Net:
    torch.manual_seed(7)
    return WithLoss(gated=False)


def planned(batch: int = 2) -> tuple[ModelDesc, Any]:
    desc = ModelDesc.from_module(net(), tokens(0, batch, 6))
    return desc, make_plan(None, desc, devices())


def what_fits_is_taken() -> None:
    desc, plan = planned()
    given: list[tuple[Any, ...]] = [(), (desc,), (desc, LIMIT), (desc, "256MiB"), (desc, devices())]
    given += [(tokens(0, 2, 6), "256 MiB")]
    for arguments in given:
        OSDP(net(), *arguments, plan=plan)
    # The batch that was planned for is the training's; the sample batch only describes the model.
    OSDP(net(), tokens(0, 1, 6), plan=plan, training=Training(local_batch=2))


def what_does_not_fit_is_refused() -> None:
    """It changed nothing, and was not looked at."""
    desc, plan = planned()
    slower = tuple(replace(link, bandwidth=1e6) for link in devices().links)
    given = (
        ("512MiB", f"limit of {LIMIT} bytes, this one is of {2 * LIMIT}"),
        (LIMIT + 1, f"limit of {LIMIT} bytes, this one is of {LIMIT + 1}"),
        (devices(memory_limit=LIMIT // 2), f"limit of {LIMIT} bytes, this one is of {LIMIT // 2}"),
        (devices(nodes=4), "for 2 ranks, device_info describes 8"),
        (devices(kind="NVIDIA H100"), "to run on 'cpu', device_info describes 'NVIDIA H100'"),
        (devices(links=slower), "fingerprint .*, so other links or speeds: leave it out"),
    )
    for device_info, message in given:
        with pytest.raises(PlanMismatchError, match=message):
            OSDP(net(), desc, device_info, plan=plan)
    with pytest.raises(PlanMismatchError, match="batch of 2 samples, the sample batch has 16"):
        OSDP(net(), tokens(0, 16, 6), plan=plan)
    with pytest.raises(PlanMismatchError) as caught:
        OSDP(net(), tokens(0, 16, 6), devices(nodes=2, kind="H200", memory_limit=1), plan=plan)
    assert len(caught.value.differences) == 4


def checks_beside_a_plan() -> None:
    what_fits_is_taken()
    what_does_not_fit_is_refused()


def test_what_is_given_beside_a_plan() -> None:
    run(2, checks_beside_a_plan)


def profiled(desc: ModelDesc, **options: Any) -> Profile:
    found = estimate(desc, devices(), Training(local_batch=desc.local_batch))
    return replace(found, measured=True, **options)


def test_a_profile_of_other_devices_is_refused() -> None:
    # A profile made on a CPU was priced for eight GPUs, and the plan said "proven optimal".
    desc = ModelDesc.from_module(net(), tokens(0, 2, 6))
    gpus = devices(kind="NVIDIA H100", nodes=4)
    with pytest.raises(
        ValueError, match=r"profile given was made on 'cpu'.* 8 devices of kind 'NVIDIA H100'"
    ):
        make_plan(None, desc, gpus, profile=profiled(desc))
    with pytest.raises(ValueError, match=r"measured here, on '\w+'.* 8 devices of kind 'NVIDIA H100'"):
        make_plan(net(), desc, gpus)
    assert make_plan(None, desc, gpus, profile=profiled(desc, device="NVIDIA H100")).measured_profile
    assert make_plan(None, desc, gpus).world_size == 8  # estimated from the speeds that were given


def test_a_profile_of_another_model_is_refused() -> None:
    desc = ModelDesc.from_module(net(), tokens(0, 2, 6))
    other = ModelDesc.from_module(WithLoss(gated=False, depth=3), tokens(0, 2, 6))
    with pytest.raises(ValueError, match=f"fingerprint {other.fingerprint}, WithLoss has {desc.fingerprint}"):
        make_plan(None, desc, devices(), profile=profiled(other))


def test_a_model_without_a_loss_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    sample = tokens(0, 2, 6)
    with caplog.at_level(logging.WARNING, logger="osdp"):
        resolve_description(net(), sample, None, None)
        resolve_description(Net(gated=False), sample, lambda logits: logits.square().mean(), None)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="osdp"):
        resolve_description(Net(gated=False), sample, None, None)
    (record,) = caplog.records
    assert "output of Net has no loss" in record.message and "loss_fn=" in record.message


def trains_on_another_batch() -> list[str]:
    _, plan = planned()
    with Records() as records:
        for batch in (1, 2):
            model = OSDP(net(), plan=plan)
            for _ in range(2):
                model(tokens(dist.get_rank(), batch, 6)).backward()
        assert records.messages == []
        model = OSDP(net(), plan=plan)
        hooks = len(model.module._forward_pre_hooks)
        with torch.no_grad():
            model(tokens(0, 64, 6))  # evaluation keeps nothing for a backward
        # Not the first one alone: the last shards of a data set may have longer batches.
        for samples in (2, 16, 16):
            model(batch=tokens(dist.get_rank(), samples, 6)).backward()
        after = len(model.module._forward_pre_hooks)
        assert after == hooks - (dist.get_rank() == 0), "once is enough"
    return records.messages


def test_a_batch_beyond_the_planned_is_told_of_once() -> None:
    told, silent = run(2, trains_on_another_batch)
    assert len(told) == 1 and silent == []
    assert "a batch has 16 samples" in told[0] and "local batch of 2" in told[0]
    assert "Training(local_batch=16)" in told[0]
