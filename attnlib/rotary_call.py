"""Calls of `Attention.rotate_and_write_kv`: checks once per kind of call, then the backend's
operation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.call_checks import check_cache_type, check_call, per_head
from attnlib.compile.operator import rotate_opaquely
from attnlib.errors import ContractError
from attnlib.instrumentation import VALIDATE_VARIABLE, checker_for_level
from attnlib.layer_scales import agree_on_scales
from attnlib.metadata_checks import check_addresses
from attnlib.ops.rotary import HeadNorm, check_rotation
from attnlib.ops.signature import tensor_check
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
    plans = getattr(metadata, "plans", None)
    if not _was_checked(layer, plans, cache, query, key, value, cos, sin, q_norm, k_norm):
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
            _keep_check(layer, plans, cache, query, key, value, cos, sin, q_norm, k_norm)
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


_CHECKED = "rotate_and_write_kv"
"""Key of the last checked call among the plans of a batch, which are dropped when it changes."""


def _keep_check(
    layer: Attention, plans: dict[Any, Any], cache: PagedKVCache | None, *call: Any
) -> None:
    """Remember a call that passed the checks, so that those of other layers skip them."""
    flags, tensors = _split(call)
    if cache is not None and (check := tensor_check(*tensors)) is not None:
        plans[_CHECKED] = (layer.impl.group, cache.signature, flags, check)


def _was_checked(layer: Attention, plans: Any, cache: PagedKVCache | None, *call: Any) -> bool:
    """Whether a call is like the last one that was checked, up to addresses and values."""
    known = None if plans is None else plans.get(_CHECKED)
    if known is None or cache is None:
        return False
    group, signature, known_flags, check = known
    flags, tensors = _split(call)
    same = group is layer.impl.group and signature is cache.signature and flags == known_flags
    return bool(same and check(*tensors) and layer._scales_agree(cache))


def _split(call: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """What a call has, and its tensors: queries, keys, values, angles and weights of norms."""
    *tensors, q_norm, k_norm = call
    given = [*tensors, None if q_norm is None else q_norm.weight]
    if k_norm is not q_norm:  # the comparison refuses a tensor that occurs twice
        given.append(None if k_norm is None else k_norm.weight)
    kinds = (norm is not None and norm.multiply_in_float32 for norm in (q_norm, k_norm))
    flags = (torch.is_grad_enabled(), *kinds, *(x is None for x in given))
    return flags, [x for x in given if x is not None]


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
