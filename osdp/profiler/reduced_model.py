"""Reduced model: a copy that runs on a device with only those blocks that are needed for measuring."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from osdp.model.description import ModelDesc
from osdp.nn.modules import keeps_dtype
from osdp.profiler.block_stubs import Stubs
from osdp.profiler.repeats import Repeat
from osdp.tracing.fake_copy import cast_inputs, copy_without_weights, on_meta, random_weights
from osdp.tracing.loss import LossFn, scalar_loss
from osdp.tracing.module_walk import Interval, Key, Observer, walk_modules
from osdp.tracing.opaque import OpaqueModules
from osdp.tracing.operators import find_parameters
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.single_draws import SingleDraws

#: Segment index of intervals that run in a stub.
NOWHERE = -1


@dataclass(frozen=True)
class ReducedModel:
    """A model that runs with only some of its blocks; the others are stubs.

    Attributes:
        model: The copy, on the device.
        batch: The batch, on the device.
        loss_fn: The loss function, as for the description.
        repeats: The blocks that are stubs.
        stubs: What they return.
        places: Index of each segment in the description, by module, call and part.
        largest_draws: Whether all layers run if random numbers that are drawn one at a time are as large as
            possible, rather than as small (:class:`SingleDraws`); ``None`` if the model draws none.
    """

    model: nn.Module
    batch: SampleBatch
    loss_fn: LossFn | None
    repeats: tuple[Repeat, ...]
    stubs: Stubs
    places: Mapping[Key, int]
    largest_draws: bool | None = None

    def with_batch(self, batch: SampleBatch) -> "ReducedModel":
        """The same model, weights and stubs included, with another batch, which is on the device.

        Before a run of either :meth:`record_stubs` is called, where there are stubs.
        """
        return replace(self, batch=batch)

    def record_stubs(self) -> None:
        """Run one forward, after which stubs return what they do for this batch."""
        self.drop_gradients()
        with self.stubs.recording():
            self.loss()

    def loss(self) -> torch.Tensor:
        """Run one plain forward; returns the loss."""
        with self._draws():
            return scalar_loss(self.batch.run(self.model), self.loss_fn)

    def walk(self, observer: Observer) -> list[Interval]:
        """Run one forward and backward under ``observer``; returns the intervals."""
        inside = {repeat.block: repeat.inside for repeat in self.repeats}
        with self._draws():
            return walk_modules(self.model, self.batch, observer, loss_fn=self.loss_fn, inside=inside)

    def _draws(self) -> AbstractContextManager[object]:
        return (
            nullcontext()
            if self.largest_draws is None
            else SingleDraws(self.model, largest=self.largest_draws)
        )

    def drop_gradients(self) -> None:
        """Free the gradients, as ``zero_grad`` does before a step."""
        self.model.zero_grad(set_to_none=True)
        for tensor in self.batch.tensors:
            tensor.grad = None

    def segments(self, intervals: Sequence[Interval]) -> list[int]:
        """Index of the segment that each interval belongs to, :data:`NOWHERE` in stubs.

        Intervals that are not in the description, since nothing ran in them, belong to the segment before.
        """
        stubs = {repeat.block for repeat in self.repeats}
        found, place = [], 0
        for interval in intervals:
            place = NOWHERE if interval.module in stubs else self.places.get(interval.key, place)
            found.append(place)
        return found


def reduced_model(
    model: nn.Module,
    batch: SampleBatch,
    model_desc: ModelDesc,
    device: torch.device,
    loss_fn: LossFn | None,
    param_dtype: torch.dtype | None,
    repeats: tuple[Repeat, ...],
) -> ReducedModel:
    """Make a copy of ``model`` on ``device``, in which the blocks of ``repeats`` are stubs.

    Raises:
        ValueError: ``model_desc`` describes another model.
    """
    # 1. The description must be of this model.
    described = {(p.name, p.shape) for op in model_desc.operators for p in op.parameters}
    present = {(p.name, p.shape) for p in find_parameters(model)}
    if described != present:
        names = sorted({name for name, _ in described ^ present})
        raise ValueError(
            f"the description is of another model: {len(names)} parameters differ, the first is "
            f"{names[0]!r}; describe this model first"
        )
    # 2. Weights are made only for the blocks that run: the whole model may not fit on the device.
    twin = copy_without_weights(model, on_meta, device)
    left_out = tuple(repeat.block for repeat in repeats)
    random_weights(twin, device, param_dtype, left_out)
    moved = batch.to(device, param_dtype)
    if model_desc.opaque and isinstance(torch.empty(0), FakeTensor):
        opaque = OpaqueModules(model, model_desc.opaque, param_dtype)
        opaque.install(twin)
        opaque.start(moved.tensors, batch.tensors)
    if param_dtype is not None:
        _cast_block_inputs(twin, model_desc, left_out, param_dtype)
    places = {s.key: index for index, s in enumerate(model_desc.segments)}
    stubs = Stubs(twin, repeats)
    reduced = ReducedModel(twin, moved, loss_fn, repeats, stubs, places)
    # 3. One forward records what the stubs have to return, and whether the model drops layers at random.
    with stubs.recording():
        draws = _find_draws(reduced, model_desc)
    return replace(reduced, largest_draws=draws)


def _find_draws(reduced: ReducedModel, model_desc: ModelDesc) -> bool | None:
    """Find by running forwards the ``largest_draws`` with which all modules of the description run.

    Where both do, that with which more run inside of opaque modules.

    Raises:
        ValueError: Neither the largest nor the smallest numbers make all of them run.
    """
    stubs = tuple(f"{repeat.block}." for repeat in reduced.repeats)
    wanted = {s.module for s in model_desc.segments if not f"{s.module}.".startswith(stubs)}
    runs: dict[bool, set[str]] = {}
    for largest in (True, False):
        ran = runs[largest] = set[str]()
        handles = [
            module.register_forward_pre_hook(lambda _module, _args, name=name, ran=ran: ran.add(name))
            for name, module in reduced.model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        with SingleDraws(reduced.model, largest=largest) as draws:
            reduced.loss()
        for handle in handles:
            handle.remove()
        if not draws.happened:
            return None
    whole = [largest for largest, ran in runs.items() if wanted <= ran]
    if whole:
        return max(whole, key=lambda largest: len(runs[largest]))
    raise ValueError(
        f"the model skips modules of its description at random ({sorted(wanted - ran)[0]!r}, ...); profile "
        "it with model.eval(), or with a layer drop rate of 0"
    )


def _cast_block_inputs(
    twin: nn.Module, model_desc: ModelDesc, left_out: Sequence[str], dtype: torch.dtype
) -> None:
    """Cast the inputs of blocks and of modules with parameters of their own, as the runtime does."""
    blocks = dict.fromkeys(op.block for op in model_desc.operators if op.block is not None and op.executed)
    own = [
        name
        for name, module in twin.named_modules()
        if next(module.parameters(recurse=False), None) is not None and not keeps_dtype(module)
    ]
    for name in dict.fromkeys((*blocks, *own)):
        if not any(name == block or name.startswith(f"{block}.") for block in left_out):
            cast_inputs(twin.get_submodule(name), dtype)
