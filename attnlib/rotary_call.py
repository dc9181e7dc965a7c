"""Calls of `Attention.rotate_and_write_kv`: checks once per kind of call, then the backend's
operation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.call_checks import check_cache_type, check_call, per_head
from attnlib.call_plans import MAX_PLANS
from attnlib.compile.operator import rotate_opaquely
from attnlib.errors import ContractError
from attnlib.instrumentation import VALIDATE_VARIABLE, checker_for_level
from attnlib.layer_scales import agree_on_scales
from attnlib.metadata_checks import check_addresses
from attnlib.ops.rotary import HeadNorm, check_rotation
from attnlib.ops.signature import tensor_signature
from attnlib.spec import AttentionType

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["rotate_and_write_kv"]


def rotate_and_write_kv(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: Any,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
) -> torch.Tensor:
    """See `Attention.rotate_and_write_kv`."""
    if torch.compiler.is_compiling():
        rotation = (cos, sin, interleaved)
        return rotate_opaquely(layer, query, key, value, cache, metadata, rotation, q_norm, k_norm)
    check_cache_type(cache)
    spec = layer.spec
    q = per_head("query", query, spec.num_heads, spec.head_size)
    k = None if key is None else per_head("key", key, spec.num_kv_heads, spec.head_size)
    v = None if value is None else per_head("value", value, spec.num_kv_heads, spec.head_size_v)
    tables = tuple(None if x is None else tensor_signature(x) for x in (cos, sin))
    norms = tuple(_norm_signature(norm) for norm in (q_norm, k_norm))
    call = layer._call_signature(query, key, value, cache, None, False)
    signature = ("rotary", call, tables, norms)
    plans = getattr(metadata, "plans", None)
    if plans is None or signature not in plans or not layer._scales_agree(cache):
        _check(layer, q, k, v, cache, metadata)
        check_rotation("query", q, cos, sin, q_norm)
        if k is not None:
            check_rotation("key", k, cos, sin, k_norm)
        if getattr(metadata, "enable_kv_scales_calculation", False):
            return _with_new_scales(
                layer, query, q, k, v, cache, metadata, (cos, sin, interleaved, q_norm, k_norm)
            )
        if cache is not None and not layer._scales_agree(cache):
            agree_on_scales(layer, cache)
        if plans is not None:
            if len(plans) >= MAX_PLANS:
                plans.clear()
            plans[signature] = True
    if VALIDATE_VARIABLE in os.environ and (checker := checker_for_level()) is not None:
        checker(layer, q, k, v, cache, metadata)
    slots = getattr(metadata, "slot_mapping", None) if layer.writes else None
    if slots is None:
        k = v = None
    impl = layer.impl
    hook = AttentionImpl.rotate_and_write_kv
    if impl.group.has_rotary_write:
        hook = type(impl).rotate_and_write_kv
    assert cache is not None  # `_check` refuses a layer without one
    out = hook(
        impl, q, k, v, cache, slots, cos, sin,
        interleaved=interleaved, q_norm=q_norm, k_norm=k_norm,
    )  # fmt: skip
    return out.view(query.shape) if query.dim() == 2 else out


def _norm_signature(norm: HeadNorm | None) -> tuple[Any, ...] | None:
    return None if norm is None else (tensor_signature(norm.weight), norm.multiply_in_float32)


def _check(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: Any,
) -> None:
    """What does not depend on angles and norms.

    Raises:
        ContractError: see `Attention.rotate_and_write_kv`.
    """
    spec = layer.spec
    if spec.attn_type is not AttentionType.DECODER or spec.use_mla:
        kind = "use_mla=True" if spec.use_mla else f"attn_type={spec.attn_type.value}"
        raise ContractError(
            f"rotate_and_write_kv serves decoders that cache keys and values, this layer has "
            f"{kind}: rotate the tensors before the call",
            rule="P11",
        )
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value)
    ):
        raise ContractError(
            "query, key or value requires a gradient, and attnlib computes no gradients: run the "
            "model under torch.inference_mode() or torch.no_grad()"
        )
    check_call(layer, query, key, value, cache, metadata, False)
    if key is not None and key.shape[0] != query.shape[0]:
        raise ContractError(
            f"query has {query.shape[0]} rows and key {key.shape[0]}; each token has one row in "
            "both",
            rule="P11",
        )
    if cache is not None and cache.device.type == "cpu":
        check_addresses(metadata, cache)


def _with_new_scales(
    layer: Attention,
    query: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: Any,
    rotation: tuple[Any, ...],
) -> torch.Tensor:
    """The separate operations, for a batch from which KV scales are computed: they are those of the
    rotated keys, which therefore exist before the write."""
    cos, sin, interleaved, q_norm, k_norm = rotation
    hook = AttentionImpl.rotate_and_write_kv
    kind = {"interleaved": interleaved}
    assert cache is not None
    if k is not None and v is not None:
        rotated = hook(layer.impl, k, None, None, cache, None, cos, sin, q_norm=k_norm, **kind)
        layer._calculate_scales(rotated, v, cache, metadata.slot_mapping)
        if not layer._scales_agree(cache):
            agree_on_scales(layer, cache)
        if layer.writes and metadata.slot_mapping is not None:
            layer.impl.write_kv(rotated, v, cache, metadata.slot_mapping)
    out = hook(layer.impl, q, None, None, cache, None, cos, sin, q_norm=q_norm, **kind)
    return out.view(query.shape) if query.dim() == 2 else out
