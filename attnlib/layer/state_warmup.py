"""The batches of a warm-up of state layers. All slots are -1: nothing is read or written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlib.cache.states import StateCache
from attnlib.layer.state import StateLayer
from attnlib.layer.warmup_batches import warmup_batches
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states import StepForm
from attnlib.workspace import BatchLimits

__all__ = ["run_state_batches"]


def run_state_batches(
    layer: StateLayer,
    cache: StateCache,
    limits: BatchLimits,
    builder: AttentionMetadataBuilder[StateMetadata],
    form: StepForm | None = None,
) -> list[tuple[int, ...]]:
    """Run every class of batch within limits on a state layer.

    Args:
        layer, cache, limits, form: as in `warmup`.
        builder: makes the metadata.

    Returns:
        Query lengths of the batches.
    """
    batches = warmup_batches(limits, layer.spec.max_rollback + 1)
    for lengths in batches:
        for has_sources in (False, True):
            _run(layer, cache, builder, lengths, limits.max_seq_len, has_sources, form)
    return batches


def _run(
    layer: StateLayer,
    cache: StateCache,
    builder: AttentionMetadataBuilder[StateMetadata],
    lengths: Sequence[int],
    max_seq_len: int,
    has_sources: bool,
    form: StepForm | None,
) -> None:
    spec, tokens, unused = layer.spec, sum(lengths), [-1] * len(lengths)
    common = CommonAttentionMetadata.from_lengths(
        lengths,
        lengths,
        device=cache.device,
        max_seq_len=max(max_seq_len, *lengths),
        state_slots=unused,
        state_sources=unused if has_sources else None,
    )
    metadata = builder.build(0, common)

    def zeros(*shape: int, dtype: torch.dtype = spec.dtype) -> torch.Tensor:
        return torch.zeros(tokens, *shape, dtype=dtype, device=cache.device)

    if spec.has_convolution:
        layer.convolve(zeros(spec.conv_channels), cache, metadata)
    if not spec.has_recurrence:
        return
    keys, values = (spec.num_key_heads, spec.key_size), (spec.num_heads, spec.value_size)
    decays = (spec.num_heads, spec.key_size) if spec.decay == "channel" else (spec.num_heads,)
    gate = zeros(*decays, dtype=torch.float32)
    beta = zeros(spec.num_heads, dtype=torch.float32) if spec.has_beta else None
    # Separate projections, and one projection for all three, whose rows are strided.
    sizes = [keys[0] * keys[1], keys[0] * keys[1], values[0] * values[1]]
    separate = zeros(*keys), zeros(*keys), zeros(*values)
    for query, key, value in (separate, torch.split(zeros(sum(sizes)), sizes, dim=1)):
        decay = None if spec.decay == "constant" else gate
        layer(query, key, value, decay, beta, cache, metadata)
    if form is not None:
        dtype = torch.float32 if form.gates == "given" else spec.dtype
        has_second = spec.has_beta and form.gates != "mamba2"
        first = None if spec.decay == "constant" else zeros(*decays, dtype=dtype)
        second = zeros(spec.num_heads, dtype=dtype) if has_second else None
        z = zeros(values[0] * values[1]) if form.output_gate else None
        layer.step(zeros(spec.conv_channels), (first, second), z, form, cache, metadata)
