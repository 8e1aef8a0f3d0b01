"""Bytes and seconds of units, as arrays."""

from dataclasses import dataclass

import numpy as np

from osdp.arrays import Bools, Floats, Ints
from osdp.cost.sharding.strategies import UnitMode


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Memory and time of ``U`` units, arrays of shape ``(U,)``; a unit is operators ``start .. stop - 1``.

    Attributes:
        start: First operator of each unit.
        stop: One past the last operator.
        mode: How its parameters are stored (:class:`osdp.cost.sharding.strategies.UnitMode`).
        slices: Number of slices it runs in; 1 if it is not sliced.
        recomputed: Whether its block is recomputed in backward.
        offloaded: Whether its shards, their gradients and optimizer states are offloaded to host memory.
        state: Bytes of parameters and optimizer states, alive through the step.
        unsharded: Bytes of the unsharded parameters while gathered, which is also the size of the
            all-gather's output; for a replicated unit, bytes of low-precision copies.
        gather_buffers: Bytes that its all-gather needs beside its output while it runs: the backend's copies,
            and the cast shards that it sends.
        gradient: Bytes of the unsharded gradients as autograd makes them.
        casts_gradient: Whether a gradient is reduced in another dtype than autograd makes it in.
        added_as: Bytes of a copy of the largest such gradient in the dtype of the sum it is added to.
        reduce_input: Bytes of the reduce-scatter's input; for operators in the root unit, what is alive in
            addition to the gradients while they are copied into it.
        reduce_peak: Most bytes alive while its gradients are reduced: gradients, the reduce-scatter's input,
            temporaries of the copy into it; for operators in the root unit, what the reduce-scatter needs in
            addition to the gradients, which are freed by then.
        accumulated: Bytes of the unsharded gradients accumulated over several microbatches, in the dtype of
            the reduction.
        gradient_kept: Bytes of the gradients left after backward.
        all_reduced: Bytes of the shard that was all-reduced between groups, which FSDP2 holds until backward
            has ended (``_all_reduce_state`` of ``FSDPParamGroup``, 2.13); 0 outside HYBRID_SHARD.
        casts_shard: Whether that is cast to become the gradient, which is then a tensor of its own.
        bucket: Bytes of the gradient bucket if replicated, else 0.
        received: Bytes that an exchange of a replicated unit's gradients receives, until backward has ended.
        num_gradients: Number of its gradients; of a unit in slices those of replicated parameters.
        largest_gradient: Most bytes of gradients that are made at once if gradients are added to an existing
            buffer (a bucket, or gradients of earlier microbatches), else 0; of a unit in slices all that its
            backward needs.
        gather_seconds: Time of one unshard.
        reduce_seconds: Time of one gradient reduction.
        host_gather: Time the host takes to issue one unshard to an accelerator; 0 on CPUs.
        host_reduce: The same of one gradient reduction.
        kept: Bytes of parameters that stay gathered between its forward and its backward.
        num_kept: Number of its slices that stay gathered.
        slice_forward: Most bytes of slices alive in forward.
        slice_regather: Time of gathering again, in backward, the slices that were not kept.
        temporary: Bytes its optimizer step needs, if the temporaries of all units add up.
        group: Index of its shard group.
        step_seconds: Time of its optimizer step.
    """

    start: Ints
    stop: Ints
    mode: Ints
    slices: Ints
    recomputed: Bools
    offloaded: Bools
    state: Floats
    unsharded: Floats
    gather_buffers: Floats
    gradient: Floats
    casts_gradient: Bools
    added_as: Floats
    reduce_input: Floats
    reduce_peak: Floats
    accumulated: Floats
    gradient_kept: Floats
    all_reduced: Floats
    casts_shard: Bools
    bucket: Floats
    received: Floats
    num_gradients: Floats
    largest_gradient: Floats
    gather_seconds: Floats
    reduce_seconds: Floats
    host_gather: Floats
    host_reduce: Floats
    step_seconds: Floats
    kept: Floats
    num_kept: Ints
    slice_forward: Floats
    slice_regather: Floats
    temporary: Floats
    group: Ints

    @property
    def sharded(self) -> Bools:
        """Units with collectives of their own: sharded, outside the root unit, shape ``(U,)``."""
        return np.asarray((self.mode == UnitMode.SHARD_GRAD_OP) | (self.mode == UnitMode.FULL_SHARD))

    @property
    def steps_in_shards(self) -> Bools:
        """Units whose parameters are whole while their optimizer states are sharded, shape ``(U,)``."""
        return np.asarray(self.mode == UnitMode.SHARD_OPTIMIZER)

    @property
    def sliced(self) -> Bools:
        """Units that run in slices, each slice with collectives of its own, shape ``(U,)``."""
        return np.asarray(self.mode == UnitMode.SLICED)

    @property
    def casts_bucket(self) -> Bools:
        """Replicated units whose bucket is cast to another dtype when it has been reduced, shape ``(U,)``."""
        replicated = ~self.sharded & ~self.sliced & ~self.in_root
        return np.asarray(replicated & (self.bucket != self.gradient_kept))

    def beside_cast(self, adds_reduced: bool) -> Floats:
        """Bytes while its bucket is cast, beyond the gradients that it leaves, shape ``(U,)``.

        Args:
            adds_reduced: Whether the cast is added to reduced gradients of earlier microbatches.
        """
        return self.bucket + (self.gradient_kept if adds_reduced else 0.0)

    @property
    def in_root(self) -> Bools:
        """Units that belong to the root unit, shape ``(U,)``."""
        return np.asarray(self.mode == UnitMode.ROOT)
