"""Checks of values, which are read from the device. ATTNLIB_VALIDATE=1 enables them.

`attnlib.layer.checks` checks what needs no host sync. `docs/validation.md` lists all checks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from attnlib.cache.storage import PagedKVCache, Scale
from attnlib.debug.list_values import check_entries, check_lists
from attnlib.debug.streams import check_stream
from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.batch_values import BatchValues
from attnlib.metadata.compressed import CompressedKeys
from attnlib.metadata.values import check_values
from attnlib.ops.scales import MAX_KV_SCALE, MIN_KV_SCALE
from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.sparse.key_selection import SelectedKeys

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["check_call_values"]


def check_call_values(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: AttentionMetadata,
    extra: SelectedKeys | CompressedKeys | QueryTensors | None = None,
) -> Callable[[], None] | None:
    """Check the values of a batch, the scales of the cache, and slopes and sinks of the layer. Warn
    if the cache saturates the new keys or values. This synchronizes with the device; while a CUDA
    graph is captured nothing is checked.

    Args:
        layer: the layer of the call.
        query, key, value: the tensors of the call, flat or per head.
        cache: the cache of the layer; None where keys are not cached.
        metadata: the metadata of the batch. Metadata without `query_start_loc` and `seq_lens` is
            not checked.
        extra: the selected keys, compressed entries or query tensors of the call.

    Returns:
        What to call after the launches; None if nothing.

    Raises:
        ContractError: the message names the tensor, the request or token, the value and the limit.
    """
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    name = layer.prefix or "(unnamed)"
    _check_batch(layer, query, cache, metadata)
    _check_per_head(layer, name)
    if isinstance(extra, CompressedKeys):
        check_entries(extra, name)
    elif isinstance(extra, SelectedKeys):
        check_lists(layer, extra, metadata, name)
    scales_outside = layer.spec.is_kv_quantized and not layer.spec.scales_in_page
    if cache is not None and scales_outside:
        for which in ("k_scale", "v_scale"):
            _check_scale(which, getattr(cache, which), name)
        slots = metadata.slot_mapping
        # A rotation spreads elements and keeps the norm of a head, so that given ones say nothing.
        if layer.writes and slots is not None and layer.spec.kv_rotation is None:
            _warn_about_saturation("keys", "k_scale", key, cache.k_scale, slots, layer, name)
            _warn_about_saturation("values", "v_scale", value, cache.v_scale, slots, layer, name)
    return check_stream(metadata, query.device) if query.is_cuda else None


def _check_batch(
    layer: Attention, query: torch.Tensor, cache: PagedKVCache | None, metadata: AttentionMetadata
) -> None:
    exact = layer.backend.get_builder_cls().needs_host_lengths
    num_blocks = None if cache is None else cache.num_blocks
    values = BatchValues.of_metadata(metadata, layer.spec.block_size, num_blocks, exact)
    if values is None:
        return  # a plug-in may store lengths in another form
    if cache is None:
        values = values._replace(table=None, slots=None)
    if values.starts and values.starts[-1] > query.shape[0]:
        raise ContractError(
            f"query_start_loc ends at {values.starts[-1]}, but query has {query.shape[0]} rows",
            rule="M1",
        )
    check_values(values)
    _check_split(metadata, values)


def _check_split(metadata: AttentionMetadata, values: BatchValues) -> None:
    """The decode part of the batch against its lengths."""
    facts, tokens = metadata.facts, metadata.num_decode_tokens
    count = facts.num_decodes
    if not count or not metadata.num_prefills:
        return  # one part
    if count > len(values.seq_lens) or values.starts[count] != tokens:
        end = values.starts[min(count, len(values.seq_lens))]
        raise ContractError(
            f"num_decode_tokens={tokens}, but query_start_loc puts {end} tokens into the first "
            f"num_decodes={count} requests: build the batch again",
            rule="M1",
        )
    longest = max(values.query_lens[:count], default=0)
    bound = facts.max_decode_query_len
    if bound is not None and longest > bound:
        raise ContractError(
            f"max_decode_query_len={bound} is below the query length {longest} of request "
            f"{values.query_lens.index(longest)}: it must be an upper bound",
            rule="M1",
        )
    rest = facts.prefill_query_start_loc
    expected = [start - tokens for start in values.starts[count:]]
    if rest is not None and rest.tolist() != expected:
        raise ContractError(
            f"prefill_query_start_loc is {rest.tolist()}, but query_start_loc says {expected}: "
            "build the batch again",
            rule="M1",
        )


def _check_per_head(layer: Attention, name: str) -> None:
    slopes, sinks = layer.impl.per_head_tensors
    if slopes is not None and not bool(slopes.isfinite().all()):
        head = int((~slopes.isfinite()).nonzero()[0])
        raise ContractError(
            f"alibi_slopes[{head}]={slopes[head].item()} of layer {name} must be finite", rule="M3"
        )
    if sinks is not None:
        wrong = sinks.isnan() | (sinks == torch.inf)
        if bool(wrong.any()):
            head = int(wrong.nonzero()[0])
            raise ContractError(
                f"sinks[{head}]={sinks[head].item()} of layer {name} must be finite or -inf",
                rule="M4",
            )


def _check_scale(which: str, scale: Scale, name: str) -> None:
    if not isinstance(scale, torch.Tensor):
        return  # checked where it was given
    flat = scale.reshape(-1)
    wrong = ~((flat >= MIN_KV_SCALE) & (flat <= MAX_KV_SCALE))
    if bool(wrong.any()):
        head = int(wrong.nonzero()[0])
        place = f"[{head}]" if scale.dim() else ""
        raise ContractError(
            f"{which}{place}={flat[head].item()} of the cache of layer {name} must be finite and "
            f"from {MIN_KV_SCALE:.3g} to {MAX_KV_SCALE:.3g}",
            rule="M9",
        )


def _warn_about_saturation(
    what: str,
    which: str,
    new: torch.Tensor | None,
    scale: Scale,
    slots: torch.Tensor,
    layer: Attention,
    name: str,
) -> None:
    """Warn about the share of elements that the cache dtype cannot hold (M9)."""
    if new is None:
        return
    written = new[: slots.shape[0]][slots >= 0]
    if written.numel() == 0:
        return
    dtype = layer.spec.kv_dtype
    largest = torch.finfo(dtype).max
    heads = written.reshape(written.shape[0], layer.spec.num_kv_heads, -1).float()
    factor = scale.reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale
    share = float(((heads / factor).abs() > largest).float().mean())
    if share > 0:
        shown = scale.tolist() if isinstance(scale, torch.Tensor) else scale
        warnings.warn(
            f"{share:.2%} of the new {what} of layer {name} saturate: they exceed {largest:.0f} "
            f"(the largest {str(dtype).removeprefix('torch.')}) times {which}={shown}. Pass a "
            "larger scale to the layer or its cache, or call layer.calc_kv_scales before the "
            "first step [M9]",
            stacklevel=2,
        )
