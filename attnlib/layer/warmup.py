"""Compile and plan before the first request: run one batch of every class within declared limits.

Compiled kernels depend on a few classes of shapes and not on lengths: the rows that share a tile
(the longest query), whether keys are split (the number of requests and the bound on sequence
lengths), whether a batch mixes decodes with prefills and where it is split, whether the LSE is
returned, and the strides of q, k and v. `warmup` covers all classes. Bounds are as large as the
limits, but the work is small: long sequences are declared, not read. It runs on the cache of the
caller, because its strides matter too, and does not change it: every slot is -1.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attnlib.backends.rotated import RotatedImpl
from attnlib.cache.states import StateCache
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.layer.attention import Attention
from attnlib.layer.cache_checks import unreported_scales
from attnlib.layer.state import StateLayer
from attnlib.layer.state_warmup import run_state_batch, unused_batches
from attnlib.layer.warmup_batches import (
    long_batches,
    new_batch,
    new_tensors,
    warmup_batches,
)
from attnlib.layer.warmup_facts import kernel_facts
from attnlib.layer.warmup_helpers import run_forms, run_helpers, run_over
from attnlib.layer.warmup_steps import run_steps
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.dispatch import has_triton, runs_kernels
from attnlib.ops.states import StepForm
from attnlib.ops.triton.launch.compilations import compiled_kernels
from attnlib.workspace import BatchLimits

__all__ = ["WarmupReport", "warmup"]


@dataclass(frozen=True)
class WarmupReport:
    """The result of `warmup`.

    Attributes:
        batches: query lengths of the batches that are covered, in order.
        seconds: duration.
        kernels_found: kernels that Triton's cache on disk had, such as those of `attnlib compile`.
        kernels_compiled: kernels that Triton compiled. Kernels that this process had used before
            count as neither.
    """

    batches: tuple[tuple[int, ...], ...]
    seconds: float
    kernels_found: int = 0
    kernels_compiled: int = 0

    def __str__(self) -> str:
        text = f"warmed up with {len(self.batches)} batches in {self.seconds:.1f} s"
        if self.kernels_found or self.kernels_compiled:
            text += f": {self.kernels_found} kernels found, {self.kernels_compiled} compiled"
        return text


def warmup(
    layer: Attention | StateLayer,
    cache: PagedKVCache | StateCache | None,
    limits: BatchLimits,
    *,
    builder: AttentionMetadataBuilder[Any] | None = None,
    max_blocks: int | None = None,
    device: torch.device | str | None = None,
    form: StepForm | None = None,
    more_caches: Sequence[PagedKVCache] = (),
) -> WarmupReport:
    """Run every class of batch within `limits` on one layer.

    Layers with the same spec and a cache of the same strides need no further warmup. The kernels
    read some caches by descriptors, which the first call over a cache makes: `more_caches` has them
    made now.

    Args:
        layer: the layer.
        cache: the cache of the layer, which is not changed, or its slots; None for encoders.
        limits: the largest batch.
        builder: the metadata builder that will be used, so that its workspace and plans are warmed
            up too; None creates one with `limits`.
        max_blocks: columns of the block table that will be used; None for as many as
            `limits.max_seq_len` needs.
        device: device of a layer without a cache.
        form: of the calls of `StateLayer.step`, which are run, too.
        more_caches: of other layers, which are not changed.

    Returns:
        The batches that are covered, and what it took.

    Raises:
        ContractError: a paged layer without a cache, or an argument of another type.
    """
    if not (isinstance(layer, (Attention, StateLayer)) and isinstance(limits, BatchLimits)):
        raise ContractError(
            f"layer is a {type(layer).__name__} and limits is a {type(limits).__name__}; call "
            "warmup(layer, cache, BatchLimits(...))"
        )
    if isinstance(layer, StateLayer):
        return _warm_states(layer, cache, limits, builder, form)
    spec = layer.spec
    if spec.is_paged and not isinstance(cache, PagedKVCache):
        raise ContractError(
            f"cache is a {type(cache).__name__}; warmup(layer, cache, limits) needs the "
            "PagedKVCache of the layer: kernels depend on its strides"
        )
    assert not isinstance(cache, StateCache)  # of an attention layer
    where = torch.device(device or torch.get_default_device()) if cache is None else cache.device
    builder = builder or layer.backend.make_builder(spec, where, limits=limits)
    started, batches = time.perf_counter(), _batches(builder, limits, where)
    columns = max_blocks or -(-limits.max_seq_len // spec.block_size)
    steps = _steps(layer, cache, limits, builder, batches, columns, where)
    with torch.no_grad(), unreported_scales(), _new_kernels(where) as new:
        run_steps(steps, where, kernel_facts(layer, cache, limits, builder, columns))
        run_over(layer, more_caches, batches, limits, builder, columns)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return _report(batches, started, new)


def _report(batches: Iterable[tuple[int, ...]], started: float, new: list[Any]) -> WarmupReport:
    """The report of a warm-up with these new kernels; logged, because engines do not show it."""
    num_found = sum(kernel.is_found for kernel in new)
    counts = num_found, len(new) - num_found
    report = WarmupReport(tuple(batches), time.perf_counter() - started, *counts)
    logging.getLogger("attnlib").info("%s", report)
    return report


def _batches(
    builder: AttentionMetadataBuilder[Any], limits: BatchLimits, device: torch.device
) -> dict[tuple[int, ...], list[int]]:
    """Query lengths of the batches to run -> bounds on sequence lengths."""
    threshold, most = builder.reorder_batch_threshold, limits.max_seq_len
    lengths = warmup_batches(limits, threshold)
    if runs_kernels(device) and builder.spec.is_paged:
        lengths += long_batches(builder.spec, limits, threshold)
    found = {one: builder.seq_len_bounds(len(one), max(one), max(most, *one)) for one in lengths}
    for one in builder.warmup_lengths(limits):
        found.setdefault(one, [most])
    return found


def _steps(
    layer: Attention,
    cache: PagedKVCache | None,
    limits: BatchLimits,
    builder: AttentionMetadataBuilder[Any],
    batches: dict[tuple[int, ...], list[int]],
    columns: int,
    device: torch.device,
) -> list[Callable[[], None]]:
    """One for each batch and bound, one for the builder's own batches, and one for what is no
    attention."""
    spec = layer.spec

    @functools.lru_cache(maxsize=1)  # batches of the same lengths follow each other
    def batch_of(lengths: tuple[int, ...]) -> CommonAttentionMetadata:
        return new_batch(spec, lengths, columns, device)

    @functools.lru_cache(maxsize=2)
    def rows_of(num_tokens: int, fused: bool) -> tuple[torch.Tensor, ...]:
        return new_tensors(spec, num_tokens, device, fused)

    def run_batch(lengths: tuple[int, ...], bound: int) -> None:
        common = batch_of(lengths).replace(max_seq_len=bound)
        for kind in _kinds_of_kernels(layer):
            with kind:
                run_forms(layer, cache, builder.build(0, common), sum(lengths), rows_of)

    def run_others() -> None:
        for kind in _kinds_of_kernels(layer):
            with kind:
                for metadata, num_tokens in builder.warmup_metadata(limits):
                    run_forms(layer, cache, metadata, num_tokens, rows_of)

    pairs = ((lengths, bound) for lengths, bounds in batches.items() for bound in bounds)
    return [
        *(partial(run_batch, *pair) for pair in pairs),
        run_others,
        partial(run_helpers, spec, device),
    ]


def _kinds_of_kernels(layer: Attention) -> list[AbstractContextManager[None]]:
    """Decodes beside prefills may rotate in other launches where decodes alone do not (P15)."""
    impl = layer.impl
    return [nullcontext(), impl.apart()] if isinstance(impl, RotatedImpl) else [nullcontext()]


def _new_kernels(device: torch.device) -> AbstractContextManager[list[Any]]:
    """The kernels of Triton that are new inside; none where there is no Triton."""
    if not (runs_kernels(device) and has_triton()):
        return nullcontext([])
    return compiled_kernels()


def _warm_states(
    layer: StateLayer,
    cache: object,
    limits: BatchLimits,
    builder: AttentionMetadataBuilder[Any] | None,
    form: StepForm | None,
) -> WarmupReport:
    if not isinstance(cache, StateCache):
        raise ContractError(
            f"warmup of a state layer needs its slots, and cache is a {type(cache).__name__}: pass "
            "StateCache.allocate(layer.spec, num_slots)"
        )
    started = time.perf_counter()
    own: Any = builder or layer.backend.make_builder(layer.spec, cache.device, limits=limits)
    batches: dict[tuple[int, ...], None] = {}  # each runs twice, the second time with sources

    def run_all() -> None:
        for lengths, metadata in unused_batches(own, limits, cache.device):
            run_state_batch(layer, cache, metadata, form)
            batches[lengths] = None

    with torch.no_grad(), _new_kernels(cache.device) as new:
        if layer.backend.get_name() == "triton":
            run_steps([run_all], cache.device)
        else:
            run_all()  # other packages time their kernels where these run first
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)
    return _report(batches, started, new)
