"""What a save in the background copies before training goes on."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from osdp.comm.objects import gather_objects
from osdp.runtime import checkpoint
from osdp.runtime.checkpoint import background, save_load
from osdp.runtime.checkpoint.background import Copying, start_copy
from osdp.runtime.checkpoint.local_tensors import (
    digest,
    in_exact_storage,
    local_tensors,
    map_local,
    owned_part,
)
from tests.helpers.distributed import run
from tests.helpers.nets import loss_of, tokens
from tests.runtime.checkpoint.test_folder import trained


def shards_of(state: dict[str, Any]) -> dict[str, DTensor]:
    named = {f"{part}.{name}": value for part, mine in state.items() for name, value in mine.items()}
    return {name: value for name, value in named.items() if isinstance(value, DTensor)}


def copies_of(model: torch.nn.Module, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    copying = Copying()
    start_copy(model, tensors, copying)
    return copying.result.result()


def copied(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    copies = iter(copies_of(model, list(local_tensors(state))))
    found: dict[str, Any] = map_local(state, lambda _: next(copies))
    return found


def copied_shards() -> None:
    model, optimizer = trained(1)
    state = checkpoint.train_state(model, optimizer)
    held, copies = shards_of(state), shards_of(copied(model, state))
    assert held and held.keys() == copies.keys()
    before = {name: value.to_local().clone() for name, value in held.items()}
    for value in held.values():  # of tied parameters more than once
        with torch.no_grad():
            value.to_local().add_(1)
    for name, value in held.items():
        copy = copies[name]
        assert copy.placements == value.placements and copy.device_mesh == value.device_mesh
        assert (copy.shape, copy.stride(), copy.dtype) == (value.shape, value.stride(), value.dtype)
        assert torch.equal(copy.to_local(), before[name])
        assert not value.to_local().numel() or not torch.equal(value.to_local(), before[name])


def test_copies_of_shards_are_laid_out_alike_and_keep_their_values() -> None:
    # Sharded and replicated parameters, odd sizes, and the states of the optimizer.
    run(2, copied_shards)


def test_copies_have_storages_of_their_own() -> None:
    """torch copies parts of a larger storage once more before it writes them."""
    model = torch.nn.Linear(2, 2)
    shapes = ((3, 5), (0, 4), (), (7,))
    tensors = [torch.randn(shape) for shape in shapes] + [torch.randn(4, 6).t(), torch.ones(3).bool()]
    for _ in range(2):
        copies = copies_of(model, tensors)
        assert all(map(torch.equal, copies, tensors))
        assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copies)
        assert [copy.stride() for copy in copies] == [tensor.stride() for tensor in tensors]
    empty = [torch.zeros(0, 4)]
    assert copies_of(model, empty)[0].shape == (0, 4)
    assert copies_of(model, []) == []


def tensors_of(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for part, mine in state.items():
        for name, value in mine.items():
            if isinstance(value, torch.Tensor):
                yield f"{part}.{name}", value


def copied_again() -> None:
    model, optimizer = trained(1)
    state = checkpoint.train_state(model, optimizer)
    first = {name: address(value) for name, value in tensors_of(copied(model, state))}
    for value in shards_of(state).values():
        with torch.no_grad():
            value.to_local().add_(1)
    again = dict(tensors_of(copied(model, state)))
    assert {name: address(value) for name, value in again.items()} == first
    for name, value in shards_of(state).items():
        copy = again[name]
        assert isinstance(copy, DTensor) and torch.equal(copy.to_local(), value.to_local())
    weights = copied(model, {"model": state["model"]})
    assert all(torch.equal(value, dict(tensors_of(state))[name]) for name, value in tensors_of(weights))


def address(value: torch.Tensor) -> int:
    return (value.to_local() if isinstance(value, DTensor) else value).data_ptr()


def test_the_memory_of_a_copy_is_kept_for_the_next() -> None:
    # Fresh pages took three quarters of the stall of a save.
    run(2, copied_again)


def divided() -> None:
    model, optimizer = trained(1)
    state = checkpoint.train_state(model, optimizer)
    assert len(set(gather_objects(digest(state)))) == 1
    mine = dict(tensors_of(owned_part(state, gather_objects(digest(state)))))
    shards = {name for name, value in shards_of(state).items() if any(p.is_shard() for p in value.placements)}
    everyone = gather_objects(sorted(mine))
    whole = [name for name, _ in tensors_of(state) if name not in shards]
    assert whole and shards and shards <= mine.keys()
    assert all(sum(name in theirs for theirs in everyone) == 1 for name in whole)
    here = gather_objects(sum(value.nbytes for name, value in mine.items() if name in whole))
    largest = max(value.nbytes for name, value in tensors_of(state) if name in whole)
    assert max(here) - min(here) <= largest


def test_what_all_ranks_hold_is_copied_by_one() -> None:
    # A replicated model was copied as a whole on each rank, and written by one.
    run(2, divided)


def test_what_is_a_part_of_a_larger_storage_needs_no_copy_to_be_written() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        padded = torch.zeros(5, 3, dtype=dtype)
        found = in_exact_storage(padded[1:4])
        assert found.untyped_storage().nbytes() == found.nbytes == padded[1:4].nbytes
        assert (found.shape, found.dtype, found.data_ptr()) == ((3, 3), dtype, padded[1:4].data_ptr())
    for odd in (torch.zeros(4, 4)[:, 1], torch.zeros(3)[3:], torch.zeros(2)):
        assert in_exact_storage(odd) is odd


def fewer_tensors_than_ranks(path: str) -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1)
    checkpoint.save_async(path, model).wait()
    checkpoint.load(path, other := torch.nn.Linear(3, 2, bias=False))
    assert torch.equal(other.weight, model.weight)
    # A mesh without rank 1: it takes no part in what is distributed over it.
    mesh = DeviceMesh("cpu", [0])
    whole = torch.arange(6.0)
    state = {"model": {"w": distribute_tensor(whole, mesh)}} if dist.get_rank() == 0 else {"model": {}}
    mine = owned_part(state, gather_objects(digest(state)))
    names = gather_objects(sorted(mine["model"]))
    assert names == [["w"], []]


def test_ranks_without_a_tensor_to_copy_take_part(tmp_path: Path) -> None:
    # A copy of no tensors failed on the second rank, and the first waited for it.
    run(2, fewer_tensors_than_ranks, str(tmp_path / "few"))


def failed_copy(path: str) -> None:
    model, optimizer = trained(1)
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(torch, "frombuffer", out_of_memory)
        saving = checkpoint.save_async(path, model, optimizer)
    with pytest.raises(RuntimeError, match=r"no checkpoint was saved at .*rank 1: .*out of memory"):
        saving.wait()
    dist.barrier()  # until rank 0 has tidied up
    assert not list(Path(path).iterdir())
    checkpoint.save_async(path, model, optimizer).wait()
    checkpoint.load(path, model, optimizer)


def not_laid_out(path: str) -> None:
    model, optimizer = trained(1)
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(save_load, "map_local", out_of_memory)
        saving = checkpoint.save_async(path, model, optimizer)
        with pytest.raises(RuntimeError, match=r"no checkpoint was saved at .*rank 1: .*out of memory"):
            saving.wait()
    dist.barrier()  # until rank 0 has tidied up
    assert not list(Path(path).iterdir())


def test_copies_that_cannot_be_laid_out_fail_the_save_on_all_ranks(tmp_path: Path) -> None:
    run(2, not_laid_out, str(tmp_path / "failed"))


class Unsaved:
    def state_dict(self) -> Any:
        raise RuntimeError("cannot be saved")


def states_copied_later(path: str) -> None:
    model, optimizer = trained(1)
    copy, may_copy = background._HostMemory.copy, Event()

    def later(memory: Any, tensors: Any, places: Any) -> Any:
        chosen = list(places)
        if len(chosen) < len(tensors) and not {0} & set(chosen):
            assert may_copy.wait(30)
        return copy(memory, tensors, chosen)

    def states() -> dict[str, torch.Tensor]:
        found = shards_of(checkpoint.train_state(model, optimizer))
        return {name: value.full_tensor().clone() for name, value in found.items()}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(background._HostMemory, "copy", later)
        # 1. The step waits, and what is saved is what there was.
        before = states()
        saving = checkpoint.save_async(path, model, optimizer)
        batch = tokens(dist.get_rank(), 2, 6)
        loss_of(model(batch), batch).backward()
        Timer(0.2, may_copy.set).start()
        optimizer.step()
        assert may_copy.is_set()
        saving.wait()
        assert any(not torch.equal(value, before[name]) for name, value in states().items())
        checkpoint.load(path, model, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in states().items())
        # 2. Inside of a step that calls a closure nothing is left for later.
        may_copy.clear()
        inside: list[Any] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(batch), batch)
            loss.backward()
            inside.append(checkpoint.save_async(path, model, optimizer))
            return loss

        optimizer.step(closure)
        inside[0].wait()
        after = states()
        checkpoint.load(path, model, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in states().items())
        assert any(not torch.equal(value, before[name]) for name, value in after.items())
        # 3. Nor does a save that failed let the steps of the next one go.
        with pytest.raises(RuntimeError, match="cannot be saved"):
            checkpoint.save_async(path, model, optimizer, data=Unsaved())
        Timer(0.2, may_copy.set).start()
        checkpoint.save_async(path, model, optimizer).wait()
        checkpoint.load(path, model, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in states().items())
        # 4. Other changes are noticed on all ranks, and the checkpoint before stays.
        may_copy.clear()
        saving = checkpoint.save_async(path, model, optimizer)
        if dist.get_rank() == 1:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        may_copy.set()
        with pytest.raises(RuntimeError, match=r"rank 1: .*optimizer states were changed in place"):
            saving.wait()
    checkpoint.load(path, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in states().items())


def test_states_are_copied_while_training_goes_on_and_steps_wait(tmp_path: Path) -> None:
    run(2, states_copied_later, str(tmp_path / "later"))


class WithState(torch.nn.Linear):
    """Its state beside its parameters is in containers that it changes."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.queue = [torch.ones(2), torch.zeros(3)]

    def get_extra_state(self) -> Any:
        return {"queues": (self.queue,)} if self.queue else {}

    def set_extra_state(self, state: Any) -> None:
        self.queue = state["queues"][0] if state else []


def test_what_changes_while_it_is_written_is_written_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With fewer tensors than were copied, those of one name were written under the next.
    model, started = WithState(), Event()
    weights, write = model.weight.detach().clone(), save_load.map_local

    def later(*arguments: Any) -> Any:
        assert started.wait(30)
        return write(*arguments)

    monkeypatch.setattr(save_load, "map_local", later)
    saving = checkpoint.save_async(tmp_path / "changed", model)
    model.queue.pop(0)
    with torch.no_grad():
        model.weight.zero_()
    started.set()
    saving.wait()
    other = WithState()
    other.queue = [torch.full((2,), 7.0)]
    checkpoint.load(tmp_path / "changed", other)
    assert torch.equal(other.weight, weights)
    assert [tensor.tolist() for tensor in other.queue] == [[1, 1], [0, 0, 0]]


LAST_WORDS = """
import sys
from concurrent.futures import thread
from time import sleep
import torch
from osdp.runtime import checkpoint
from osdp.runtime.checkpoint import save_load
write = save_load._write
def at_the_end(*arguments):
    while not thread._shutdown:
        sleep(0.01)
    write(*arguments)
save_load._write = at_the_end
model = torch.nn.Linear(3, 2)
torch.nn.init.ones_(model.weight)
checkpoint.save_async(sys.argv[1], model)
"""


def test_a_program_that_ends_writes_its_last_save(tmp_path: Path) -> None:
    # At its end no pool of threads takes another task: files were not synced, and nothing was published.
    command = [sys.executable, "-c", LAST_WORDS, str(tmp_path / "last")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "was not saved" not in ended.stderr
    checkpoint.load(tmp_path / "last", model := torch.nn.Linear(3, 2))
    assert torch.equal(model.weight, torch.ones(2, 3))


def test_state_that_is_empty_is_loaded(tmp_path: Path) -> None:
    # There is nothing of it to write, and it was said to be missing.
    model, other = WithState(), WithState()
    model.queue, other.queue = [], []
    checkpoint.save(tmp_path / "empty", model)
    checkpoint.load(tmp_path / "empty", other)
    assert torch.equal(other.weight, model.weight)
    assert other.queue == []


class WithAnything(WithState):
    """Its extra state is whatever it was given."""

    def get_extra_state(self) -> Any:
        return self.queue

    def set_extra_state(self, state: Any) -> None:
        self.queue = state


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ({"scales": {}}, {"scales": {}}),
        ([torch.ones(2), torch.zeros(3)], []),
        ([torch.ones(2), torch.zeros(3)], [torch.zeros(2)]),
        ({"steps": 3, "queue": [torch.ones(2)]}, {}),
        ({"steps": 3, "seen": {"a": torch.ones(2, dtype=torch.int64)}}, {"steps": 0, "seen": {}}),
        ([torch.ones(2)], [torch.zeros(2), torch.zeros(2)]),
        ((1, 2), ()),
        ([], []),
        ({"scales": {}, "steps": 3}, {"scales": {}, "steps": 0}),
        ([{}, torch.ones(2)], []),
        ({0: torch.ones(2), 1: 3.0}, {0: torch.zeros(2), 1: 0.0}),
        (torch.ones(3), torch.zeros(2)),
    ],
)
def test_extra_state_comes_back_as_it_was_saved(tmp_path: Path, saved: Any, own: Any) -> None:
    """Of a queue that the new model did not have nothing was loaded, of a shorter one its beginning."""
    model, other = WithAnything(), WithAnything()
    model.queue, other.queue = saved, own
    checkpoint.save(tmp_path / "saved", model)
    checkpoint.load(tmp_path / "saved", other)
    assert repr(other.queue) == repr(saved)


def out_of_memory(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("out of memory")


def test_a_copy_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    # The others went on to write, and waited for it.
    run(2, failed_copy, str(tmp_path / "failed"))


def of_two_stages() -> None:
    stage = dist.get_rank() // 2
    state = {"model": {f"{stage}.{name}": torch.zeros(3) for name in "ab"}}
    mine = owned_part(state, gather_objects(digest(state)))
    assert gather_objects(sorted(mine["model"])) == [["0.a"], ["0.b"], ["1.a"], ["1.b"]]


def test_ranks_of_a_stage_divide_what_they_hold() -> None:
    run(4, of_two_stages)


def test_lazy_views_and_other_kinds_of_tensors_are_left_alone() -> None:
    # They have no bytes of their own to be looked at.
    lazy = torch.zeros(5, dtype=torch.complex64)[1:4].conj()
    assert in_exact_storage(lazy) is lazy
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert in_exact_storage(parameter) is parameter
