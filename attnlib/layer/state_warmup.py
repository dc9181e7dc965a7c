"""The batches of a warm-up of state layers. All slots are -1: nothing is read or written."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnlib.cache.states import StateCache
from attnlib.layer.state import StateLayer
from attnlib.layer.warmup_batches import warmup_batches
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.states import StateMetadata, StateMetadataBuilder
from attnlib.ops.states import StepForm
from attnlib.workspace import BatchLimits

__all__ = ["run_state_batch", "unused_batches"]


def unused_batches(
    builder: StateMetadataBuilder,
    limits: BatchLimits,
    device: torch.device,
    *,
    with_sources: bool = True,
) -> Iterator[tuple[tuple[int, ...], StateMetadata]]:
    """Query lengths and metadata of every class of batch within limits.

    Args:
        builder: makes the metadata.
        limits: the largest batch.
        device: of the batches.
        with_sources: also with sources beside the slots.
    """
    for lengths in warmup_batches(limits, builder.spec.max_rollback + 1):
        unused = [-1] * len(lengths)
        for sources in (None, unused) if with_sources else (None,):
            common = CommonAttentionMetadata.from_lengths(
                lengths,
                lengths,
                device=device,
                max_seq_len=max(limits.max_seq_len, *lengths),
                state_slots=unused,
                state_sources=sources,
            )
            yield lengths, builder.build(0, common)


def run_state_batch(
    layer: StateLayer, cache: StateCache, metadata: StateMetadata, form: StepForm | None = None
) -> None:
    """Run every call of a state layer on a batch; arguments as of `warmup`."""
    spec, tokens = layer.spec, metadata.num_actual_tokens

    def zeros(*shape: int, dtype: torch.dtype = spec.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=cache.device)

    if spec.has_convolution:
        layer.convolve(zeros(tokens, spec.conv_channels), cache, metadata)
    if not spec.has_recurrence:
        return
    shapes, is_constant = spec.input_shapes(tokens), spec.decay == "constant"

    def gates(dtype: torch.dtype, has_beta: bool) -> tuple[Tensor | None, Tensor | None]:
        decay = None if is_constant else zeros(*shapes["log_decay"], dtype=dtype)
        return decay, zeros(*shapes["beta"], dtype=dtype) if has_beta else None

    # Separate projections, and one projection for all three, whose rows are strided.
    parts = [shapes[name] for name in ("query", "key", "value")]
    sizes = [heads * size for _, heads, size in parts]
    separate = [zeros(*shape) for shape in parts]
    for projected in (separate, torch.split(zeros(tokens, sum(sizes)), sizes, dim=1)):
        layer(*projected, *gates(torch.float32, spec.has_beta), cache, metadata)
    if form is not None:
        dtype = torch.float32 if form.gates == "given" else spec.dtype
        given = gates(dtype, spec.has_beta and form.gates != "mamba2")
        z = zeros(tokens, sizes[2]) if form.output_gate else None
        layer.step(zeros(tokens, spec.conv_channels), given, z, form, cache, metadata)
