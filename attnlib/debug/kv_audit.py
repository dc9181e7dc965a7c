"""Errors that KV formats cause in recorded attention calls.

A call is computed twice in float32 by the torch backend: over the keys and values of the recording,
and over a cache that stores the same keys and values in another format. The difference is the error
of the format alone; it contains no rounding of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnlib.backends.rotated import RotatedImpl
from attnlib.cache.storage import PagedKVCache, Scale
from attnlib.debug.audit_formats import AUDIT_FORMATS as AUDIT_FORMATS
from attnlib.debug.audit_formats import AuditFormat as AuditFormat
from attnlib.debug.audit_formats import audit_formats as audit_formats
from attnlib.debug.audit_formats import named_format as named_format
from attnlib.debug.format_errors import FormatErrors as FormatErrors
from attnlib.debug.format_errors import KVAudit as KVAudit
from attnlib.debug.fp8_queries import (
    attend_with_rounded_weights,
    round_queries,
    rounded_requests,
)
from attnlib.errors import ContractError
from attnlib.layer import Attention
from attnlib.ops.scales import scale_for, valid_scale
from attnlib.testing.layouts import read_slots
from attnlib.testing.materialized_case import MaterializedCase

__all__ = [
    "AUDIT_FORMATS",
    "AuditFormat",
    "FormatErrors",
    "KVAudit",
    "audit_call",
    "audit_formats",
    "named_format",
]


def audit_call(
    step: MaterializedCase, formats: Sequence[AuditFormat] = AUDIT_FORMATS
) -> dict[str, FormatErrors]:
    """The errors of formats in one recorded call.

    Args:
        step: the call, with this step's keys and values in its cache (`capture_call` of an
            observer; `load_recording`). Its cache is not changed.
        formats: what to compare.

    Returns:
        Errors by the label of the format.

    Raises:
        ContractError: the cache of the call does not hold this step's keys, or is quantized itself.
    """
    if not step.inputs.kv_written:
        raise ContractError("the recording does not hold the keys of its own step: record it again")
    if step.spec.is_kv_quantized or step.spec.kv_rotation is not None:
        raise ContractError(
            f"the recorded call has kv_cache_dtype={step.spec.kv_format.name} and kv_rotation="
            f"{step.spec.kv_rotation}, and the audit compares formats with the keys of the model: "
            "record it with kv_cache_dtype='auto' and without a rotation"
        )
    inputs = step.inputs
    slots = sorted(
        {
            slot
            for request, seq_len in enumerate(inputs.batch.seq_lens)
            for slot in inputs.placement.slots(request, 0, seq_len, step.spec.block_size)
        }
    )
    key, value = (
        read_slots(view, slots).float() for view in (inputs.cache.key, inputs.cache.value)
    )
    tokens = torch.tensor(slots, dtype=torch.int64, device=key.device)
    model = AuditFormat("model", "float32", "one")
    out, lse = _attend(step, model, key, value, tokens)[:2]
    found: dict[str, FormatErrors] = {}
    for one in formats:
        try:
            new_out, new_lse, cache, stored = _attend(step, one, key, value, tokens)
        except ContractError as error:
            found[one.label] = FormatErrors(reason=str(error))
            continue
        errors = _compare(out, lse, new_out, new_lse)
        errors.saturated, errors.stored = _count_clipped(cache, *stored, slots)
        spec = step.spec.replace(**one.spec_fields)
        errors.bytes_per_token = spec.kv_bytes_per_token
        found[one.label] = errors
    return found


def _attend(
    step: MaterializedCase,
    one: AuditFormat,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, PagedKVCache, tuple[torch.Tensor, torch.Tensor]]:
    """Output and LSE in float32 over a cache of a format that holds these tokens, the cache, and
    keys and values as it quantizes them."""
    layer, cache = _layer_and_cache(step, one, key, value)
    inputs, spec, device = step.inputs, layer.spec, key.device
    layer.impl.write_kv(key, value, cache, slots)
    metadata = layer.backend.make_builder(spec, device).build(0, step.common())
    # Not through the layer, whose observers may be running this audit.
    query = inputs.query.to(torch.float32, copy=True)
    used = layer.impl.attention_params(metadata, cache)
    rounded = (
        rounded_requests(inputs.query_start_loc, inputs.seq_lens, used.causal)
        if one.fp8_queries
        else []
    )
    for request in rounded:
        query[request.rows] = round_queries(query[request.rows])
    out = query.new_empty(query.shape[0], spec.num_heads, spec.head_size_v)
    lse = query.new_empty(query.shape[:2])
    layer.impl.forward(query, cache, metadata, out, lse)
    attend_with_rounded_weights(query, cache, inputs.block_table, rounded, used, out)
    impl, stored = layer.impl, (key, value)
    if isinstance(impl, RotatedImpl):
        stored = impl.rotated_kv(key, value)
    return out, lse, cache, stored


def _layer_and_cache(
    step: MaterializedCase, one: AuditFormat, key: torch.Tensor, value: torch.Tensor
) -> tuple[Attention, PagedKVCache]:
    """The layer of a step in float32, and an empty cache of a format."""
    inputs, params = step.inputs, step.params
    # Values that are a prefix of the keys (P10) are stored once, with one scale.
    scales = _scales(one, key, value)
    scales = (scales[0], scales[0]) if step.spec.use_mla else scales
    spec = step.spec.replace(
        dtype=torch.float32,
        **one.spec_fields,
        kv_cache_layout=None,
        needs_lse=True,
        batch_invariant=False,
        kv_sharing=False,
        allow_fp8_queries=one.fp8_queries,
        kv_scale_kind="head"
        if isinstance(scales[0], torch.Tensor) and scales[0].dim()
        else "tensor",
    )
    device = key.device
    outside: dict[str, Any] = {"k_scale": scales[0], "v_scale": scales[1]}
    cache = PagedKVCache.allocate(
        spec,
        max(1, inputs.placement.num_blocks),
        device,
        **({} if spec.scales_in_page else outside),
    )
    extra: dict[str, Any] = {}
    if spec.score_function is not None:
        extra["score_tensors"] = step.score_tensors()
    layer = Attention(
        spec,
        backend="torch",
        scale=params.scale,
        alibi_slopes=params.alibi_slopes,
        sinks=params.sinks,
        device=device,
        **extra,
    )
    return layer, cache


def _scales(one: AuditFormat, key: torch.Tensor, value: torch.Tensor) -> tuple[Scale, Scale]:
    if one.scales in ("one", "page"):
        return 1.0, 1.0
    largest = torch.finfo(
        torch.float8_e5m2 if one.kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
    ).max
    if one.scales == "tensor":
        return scale_for(key, largest), scale_for(value, largest)
    k_scale, v_scale = (
        torch.stack([scale_for(x[:, head], largest) for head in range(x.shape[1])])
        for x in (key, value)
    )
    return k_scale, v_scale


def _compare(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
) -> FormatErrors:
    error = new_out.double() - out.double()
    seen = lse.isfinite()
    lse_error = (new_lse[seen].double() - lse[seen].double()).abs()
    return FormatErrors(
        squared_error=float(error.square().sum()),
        squared_output=float(out.double().square().sum()),
        max_error=float(error.abs().max()) if error.numel() else 0.0,
        max_output=float(out.abs().max()) if out.numel() else 0.0,
        lse_error=float(lse_error.sum()),
        max_lse_error=float(lse_error.max()) if lse_error.numel() else 0.0,
        lse_count=int(seen.sum()),
    )


def _count_clipped(
    cache: PagedKVCache, key: torch.Tensor, value: torch.Tensor, slots: list[int]
) -> tuple[int, int]:
    """(elements beyond the largest number that their scale can store, all elements)."""
    clipped = 0
    sides = (
        (key, cache.key_cache, cache.k_scale),
        (value, cache.value_cache, cache.v_scale),
    )
    for (x, view, scale), stored in zip(sides, cache.page_formats, strict=True):
        if stored is not None and stored.largest == 0:
            continue  # its numbers are not a scale times one of a range
        if stored is not None and isinstance(scale, torch.Tensor):
            factor = read_slots(scale, slots).float()
            largest = (factor * stored.largest).repeat_interleave(
                x.shape[-1] // factor.shape[-1], dim=-1
            )
        elif isinstance(scale, torch.Tensor):
            largest = valid_scale(scale).reshape(-1, 1) * torch.finfo(view.dtype).max
        else:
            largest = x.new_full((), scale * torch.finfo(view.dtype).max)
        # A scale that was rounded down by its dtype clips by less than a step, which is rounding.
        clipped += int((x.abs() > largest * (1 + 2.0**-10)).sum())
    return clipped, key.numel() + value.numel()
