"""One check per field of `AttentionSpec`, against what a backend declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attnlib.capabilities.declaration import NOT_STATED, Capabilities
from attnlib.capabilities.predicates import check_cudagraph, flag, member, not_stated
from attnlib.kv_dtype import format_pair
from attnlib.spec import AttentionSpec

__all__ = ["CHECKS"]


_Check = Callable[[AttentionSpec, Capabilities], "str | None"]


def _check_head_size_v(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if spec.head_size_v == spec.head_size or spec.use_mla or caps.head_size_v_may_differ is True:
        return None
    if caps.head_size_v_may_differ is NOT_STATED:
        return not_stated("head_size_v_may_differ")
    return f"head_size_v={spec.head_size_v} must equal head_size={spec.head_size}"


def _open_reason(spec: AttentionSpec, caps: Capabilities) -> str | None:
    """Why a backend does not read the open formats of a layer."""
    names = {side.name for side in (spec.kv_format, spec.value_format) if side.is_open}
    unread = sorted(names.difference(caps.kv_formats or ()))
    if not unread or caps.open_kv_formats:
        return None
    return f"open KV format {', '.join(unread)}: not supported (backend='torch' reads all of them)"


def _check_kv_cache_dtype(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if format_pair(spec.kv_format, spec.value_format) is not None:
        return None  # `value_cache_dtype` covers both
    if spec.kv_format.is_open:
        return _open_reason(spec, caps)
    if spec.scales_in_page:
        return member("kv_formats", lambda s: s.kv_format.name, "kv_cache_dtype")(spec, caps)
    if spec.kv_dtype == spec.dtype:
        return None  # the check of dtype covers a cache of the same dtype
    return member("kv_cache_dtypes", lambda s: s.kv_dtype, "kv_cache_dtype")(spec, caps)


def _check_value_cache_dtype(spec: AttentionSpec, caps: Capabilities) -> str | None:
    pair = format_pair(spec.kv_format, spec.value_format)
    if pair is None:
        return None
    if spec.has_open_format:
        return _open_reason(spec, caps)
    label = "formats of keys and values"
    return member("kv_format_pairs", lambda _: pair, label)(spec, caps)


def _check_kv_scale_kind(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if not spec.is_kv_quantized or spec.scales_in_page:
        return None
    return member("kv_scale_kinds", lambda s: s.kv_scale_kind, "kv_scale_kind")(spec, caps)


def _check_layout(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if spec.kv_cache_layout is None or not spec.is_paged or "ANY" in (caps.kv_cache_layouts or ()):
        return None
    if spec.scales_in_page:
        return None  # the format has its own pages, which `kv_formats` covers
    return member("kv_cache_layouts", lambda s: s.kv_cache_layout, "kv_cache_layout")(spec, caps)


def _check_block_size(spec: AttentionSpec, caps: Capabilities) -> str | None:
    return (
        member("block_sizes", lambda s: s.block_size, "block_size")(spec, caps)
        if spec.is_paged
        else None
    )


def _check_score_function(spec: AttentionSpec, caps: Capabilities) -> str | None:
    function = spec.score_function
    label = "score_function={spec.score_function}"
    reason = flag("score_function", lambda s: s.score_function, label)(spec, caps)
    if reason is not None or function is None:
        return reason
    label = f"query tensors ({', '.join(function.query_tensors)})"
    return flag("query_tensors", lambda _: function.query_tensors, label)(spec, caps)


CHECKS: Mapping[str, _Check] = {
    "num_heads": lambda spec, caps: (
        None
    ),  # any number: what can fail is the ratio, checked by num_kv_heads
    "num_kv_heads": member("group_sizes", lambda s: s.group_size, "num_heads/num_kv_heads"),
    "head_size": member("head_sizes", lambda s: s.head_size, "head_size"),
    "head_size_v": _check_head_size_v,
    "dtype": member("dtypes", lambda s: s.dtype, "dtype"),
    "kv_cache_dtype": _check_kv_cache_dtype,
    "value_cache_dtype": _check_value_cache_dtype,
    "kv_scale_kind": _check_kv_scale_kind,
    "kv_rotation": lambda spec, caps: None,  # the layer rotates, in front of every backend
    "block_size": _check_block_size,
    "kv_cache_layout": _check_layout,
    "attn_type": member("attn_types", lambda s: s.attn_type, "attn_type"),
    "mask_kind": member("mask_kinds", lambda s: s.mask_kind, "mask_kind"),
    "sliding_window": flag(
        "sliding_window", lambda s: s.sliding_window, "sliding_window={spec.sliding_window}"
    ),
    "window": flag(
        "sliding_window", lambda s: s.window and not s.window.is_full, "window={spec.window}"
    ),
    "attention_chunk_size": flag(
        "attention_chunks",
        lambda s: s.attention_chunk_size,
        "attention_chunk_size={spec.attention_chunk_size}",
    ),
    "logits_soft_cap": flag(
        "logits_soft_cap", lambda s: s.logits_soft_cap, "logits_soft_cap={spec.logits_soft_cap}"
    ),
    "has_alibi": flag("alibi", lambda s: s.has_alibi, "ALiBi slopes"),
    "has_sink": flag("sink", lambda s: s.has_sink, "attention sinks"),
    "token_sinks": flag("token_sinks", lambda s: s.token_sinks, "sinks of query tokens"),
    "score_function": _check_score_function,
    "key_selection": flag(
        "key_selection", lambda s: s.key_selection, "key_selection={spec.key_selection}"
    ),
    "compressed_entries": flag(
        "compressed_entries",
        lambda s: s.compressed_entries,
        "compressed_entries={spec.compressed_entries}",
    ),
    "allow_fp8_queries": lambda spec, caps: None,  # a permission, which no backend has to use
    "use_mla": flag("mla", lambda s: s.use_mla, "multi-head latent attention"),
    "needs_lse": flag("lse", lambda s: s.needs_lse, "returning the LSE"),
    "kv_sharing": flag("kv_sharing", lambda s: s.kv_sharing, "sharing another layer's cache"),
    "batch_invariant": flag("batch_invariant", lambda s: s.batch_invariant, "batch_invariant=True"),
    "cudagraph": check_cudagraph,
}
"""Spec field -> its check; a test compares the keys with the fields of `AttentionSpec`."""
