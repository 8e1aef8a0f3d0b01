"""The oracle of live bytes: against a hand-counted step, torch's trackers and a formula of FSDP2."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.support.memory_oracle import (
    Step,
    Timeline,
    UnbalancedError,
    fake_group,
    measure_peak,
    training_step,
)

WIDTH, LAYERS, BATCH = 256, 6, 2
P = WIDTH * WIDTH * 4
ACTIVATION = BATCH * WIDTH * 4


def stack() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def shard(model: nn.Sequential, mesh: DeviceMesh, reshard: bool) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)


def step_of(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    x = torch.ones(BATCH, WIDTH)
    return training_step(model, optimizer, lambda: model(x).sum())


def sharded(world_size: int, reshard: bool) -> Timeline:
    with fake_group(world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        return measure_peak(lambda: step_of(shard(stack(), mesh, reshard)))


def test_plain_step_is_what_one_counts_by_hand():
    timeline = measure_peak(lambda: step_of(stack()))
    # Parameters, two moments and the gradients of the step before; the batch.
    assert timeline.start == pytest.approx(4 * LAYERS * P + ACTIVATION, abs=1024)
    assert timeline.end == timeline.start
    # AdamW's loop: the denominator of the parameter before, a square root and a quotient.
    assert timeline.peak == pytest.approx(timeline.end + 3 * P, abs=1024)
    assert timeline.peak_moment == "Optimizer.step#AdamW.step"
    # At the end of forward there is the output of every layer.
    assert timeline.peak_in("forward") == pytest.approx(3 * LAYERS * P + (LAYERS + 1) * ACTIVATION, abs=2048)


@pytest.mark.parametrize("world_size", [2, 8, 64])
@pytest.mark.parametrize("reshard", [True, False])
def test_sharded_step_is_fsdp2s_own_formula(world_size: int, reshard: bool):
    timeline = sharded(world_size, reshard)
    states = 3 * LAYERS * P / world_size
    # Forward unshards unit u while the gather of the unit before is still held: both gathers and the copy.
    kept = 0 if reshard else (LAYERS - 1) * P
    assert timeline.peak_in("forward") == pytest.approx(states + kept + 3 * P, rel=0.02)
    # Backward of unit u: its parameters and gradient, the next unit's gather or all kept parameters below it,
    # the reduce-scatter input of the unit before; gradients that are already reduced.
    at = [
        states + done * P / world_size + P + P + (P if done else 0) + ((LAYERS - 1 - done) * P)
        for done in range(LAYERS)
    ]
    resharded = [
        states + done * P / world_size + P + P + (P if done else 0) + (P if done < LAYERS - 1 else 0)
        for done in range(LAYERS)
    ]
    assert timeline.peak_in("backward") == pytest.approx(max(resharded if reshard else at), rel=0.02)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("reshard", [True, False])
def test_sharded_step_agrees_with_fsdp_mem_tracker(reshard: bool):
    with fake_group(8):
        mesh = init_device_mesh("cpu", (8,))
        with FakeTensorMode():
            model = shard(stack(), mesh, reshard)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
            tracker = FSDPMemTracker(model, optimizer)
            x = torch.ones(BATCH, WIDTH)
            tracker.track_inputs((x,))
            with tracker:
                tracked_steps(model, optimizer, x, tracker)
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert sharded(8, reshard).peak == pytest.approx(peak, rel=0.02)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_plain_step_agrees_with_mem_tracker():
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    tracker = MemTracker()
    x = torch.ones(BATCH, WIDTH)
    tracker.track_external(model, optimizer, x)
    with tracker:
        tracked_steps(model, optimizer, x, tracker)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert measure_peak(lambda: step_of(stack())).peak == pytest.approx(peak, rel=0.01)


def tracked_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, tracker: MemTracker
) -> None:
    for _ in range(2):
        tracker.reset_mod_stats()
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()


def test_workspace_inside_a_kernel_is_seen():
    """A tracker at the dispatcher sees results only: of a sort, the values and the indices."""

    def build() -> Step:
        x = torch.ones(1 << 16)
        return lambda: torch.sort(x)

    timeline = measure_peak(build)
    values_and_indices = (4 + 8) << 16
    assert timeline.peak - timeline.start > values_and_indices


def test_a_leak_is_an_error_rather_than_a_figure():
    kept: list[torch.Tensor] = []

    def build() -> Step:
        return lambda: kept.append(torch.ones(10_000))

    with pytest.raises(UnbalancedError, match=r"120000 bytes"):
        measure_peak(build)


def test_what_lived_before_does_not_count():
    before = torch.ones(1_000_000)
    timeline = measure_peak(lambda: step_of(stack()))
    assert timeline.start == pytest.approx(4 * LAYERS * P + ACTIVATION, abs=1024)
    assert before.numel() == 1_000_000


def test_moments_add_up():
    timeline = sharded(4, True)
    live = timeline.start
    for moment in timeline.moments:
        live += moment.change
        assert moment.live == live
    assert timeline.end == live
    assert max(moment.live for moment in timeline.moments) == timeline.peak


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_peak_is_the_allocators():
    timeline = measure_peak(lambda: step_on("cuda"), device="cuda")
    assert timeline.start >= 4 * LAYERS * P
    assert timeline.peak >= timeline.start


def step_on(device: str) -> Step:
    model = stack().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.ones(BATCH, WIDTH, device=device)
    gc.collect()
    return training_step(model, optimizer, lambda: model(x).sum())
