"""The launch key: everything that grids, constants and kernels follow from, besides addresses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlib.ops.latent import values_are_prefix
from attnlib.ops.params import AttentionParams
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.hopper_tiles import is_long
from attnlib.ops.triton.launch.scales import scale_signature
from attnlib.ops.triton.launch.score import score_signature

LENGTH_STEP = 4096
"""Step of the classes of sequence lengths."""

_SMALL_BLOCKS = 8
"""Tokens per block from which TMA reads them."""

__all__ = ["LENGTH_STEP", "batch_signature", "call_signature", "length_class"]


def call_signature(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None,
    params: AttentionParams,
) -> tuple[Any, ...]:  # fmt: skip
    """The signature of a call made without a layer; a layer passes its own (`layer.py`)."""
    causal, alibi, sinks = params.causal, params.alibi_slopes, params.sinks
    return (
        tensor_signature(query), tensor_signature(key), tensor_signature(value),
        values_are_prefix(key, value), tensor_signature(out),
        None if lse is None else tensor_signature(lse),
        params.scale, params.window, params.attention_chunk_size, params.logits_soft_cap,
        params.allow_fp8_queries,
        causal if isinstance(causal, bool) else "per request",
        None if alibi is None else tensor_signature(alibi),
        None if sinks is None else tensor_signature(sinks),
        scale_signature(params.k_scale), scale_signature(params.v_scale), score_signature(params),
    )  # fmt: skip


def batch_signature(batch: BatchTensors) -> tuple[Any, ...]:
    """What a launch follows from in the tensors of its batch: dtypes, row counts and strides."""
    starts, lens, table, flags, bias, _, counters, _, score_tensors, _ = batch
    return (
        starts.dtype, starts.shape, starts.stride(), lens.dtype, lens.shape, lens.stride(),
        None if table is None else (table.dtype, table.stride()),
        None if flags is None else (flags.dtype, flags.stride()),
        None if bias is None else (bias.dtype, bias.shape[1], bias.stride()),
        None if counters is None else (counters.dtype, counters.numel()), len(score_tensors),
    )  # fmt: skip


def length_class(batch: BatchTensors, cache: Tensor) -> int:
    """What the launches of a prefill follow from in the bound of the sequence lengths.

    Where a cache has elements of 8 bits or small blocks, its keys may be copied into scratch
    memory. Other prefills depend on whether requests are long.
    """
    copied = cache.element_size() == 1 or cache.shape[1] < _SMALL_BLOCKS
    return -(-batch.max_seq_len // LENGTH_STEP) if copied else int(is_long(batch.max_seq_len))
