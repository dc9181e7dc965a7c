"""Calls of `Attention.rotate_and_write_kv`: checks once per kind of call, then the backend's
operation."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.instrumentation import VALIDATE_VARIABLE, checker_for_level
from attnlib.layer.checks import check_cache_type, check_call, per_head
from attnlib.layer.metadata_checks import check_addresses
from attnlib.layer.operator import rotate_opaquely
from attnlib.layer.scales import agree_on_scales
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
    call = (query, key, value, cos, sin, interleaved, q_norm, k_norm)
    known = _find_checked(layer, plans, cache, call)
    if known is None:
        _check(layer, q, k, v, cache, metadata)
        check_rotation("query", q, cos, sin, q_norm)
        if k is not None:
            check_rotation("key", k, cos, sin, k_norm)
        if getattr(metadata, "enable_kv_scales_calculation", False):
            return _with_new_scales(
                layer, query, q, k, v, cache, metadata, (cos, sin, interleaved, q_norm, k_norm)
            )
    assert cache is not None  # `_check` refuses a layer without one
    if known is None and not layer._scales_agree(cache):
        agree_on_scales(layer, cache)
    if VALIDATE_VARIABLE in os.environ and (checker := checker_for_level()) is not None:
        checker(layer, q, k, v, cache, metadata)
    slots = getattr(metadata, "slot_mapping", None) if layer.writes else None
    if slots is None:
        k = v = None
    if known is None:
        known = _CheckedCall.of(layer, cache, call, (q, k, v), slots)
        if plans is not None and known.check is not None:
            plans[_CHECKED] = known
    if known.run is not None:
        out = known.run(q, k, v, cache, cos, sin, q_norm, k_norm)
    else:
        impl = layer.impl
        hook: Any = impl.rotate_and_write_kv
        if not impl.group.has_rotary_write:
            hook = functools.partial(AttentionImpl.rotate_and_write_kv, impl)
        norms = {"q_norm": q_norm, "k_norm": k_norm}
        out = hook(q, k, v, cache, slots, cos, sin, interleaved=interleaved, **norms)
    return out.view(query.shape) if query.dim() == 2 else out


_CHECKED = "rotate_and_write_kv"
"""Key of the last checked call among the plans of a batch, which are dropped when it changes."""


class _CheckedCall(NamedTuple):
    """A call that passed the checks, for calls that differ in addresses and values only.

    Attributes:
        group: of the layer.
        cache_signature: of its cache.
        flags: what the call has besides tensors.
        check: compares the tensors of another call; None where torch cannot.
        run: the plan of the backend, or None.
    """

    group: Any
    cache_signature: Any
    flags: tuple[Any, ...]
    check: Callable[..., bool] | None
    run: Callable[..., torch.Tensor] | None

    @classmethod
    def of(
        cls,
        layer: Attention,
        cache: PagedKVCache,
        call: tuple[Any, ...],
        rows: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        slots: torch.Tensor | None,
    ) -> _CheckedCall:
        """Remember a call; `rows` are its queries, keys and values per head."""
        flags, tensors = _split(call)
        cos, sin, interleaved, q_norm, k_norm = call[3:]
        group, run = layer.impl.group, None
        if group.has_rotary_plan:
            run = layer.impl.plan_rotary_write(
                *rows, cache, slots, cos, sin, interleaved=interleaved, q_norm=q_norm,
                k_norm=k_norm,
            )  # fmt: skip
        return cls(group, cache.signature, flags, tensor_check(*tensors), run)


def _find_checked(
    layer: Attention, plans: Any, cache: PagedKVCache | None, call: tuple[Any, ...]
) -> _CheckedCall | None:
    """The last checked call, if this one is like it."""
    known: _CheckedCall | None = None if plans is None else plans.get(_CHECKED)
    if known is None or known.check is None or cache is None:
        return None
    flags, tensors = _split(call)
    same = known.group is layer.impl.group and known.cache_signature is cache.signature
    if same and flags == known.flags and known.check(*tensors) and layer._scales_agree(cache):
        return known
    return None


def _split(call: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """What a call has, and its tensors: queries, keys, values, angles and weights of norms."""
    *tensors, interleaved, q_norm, k_norm = call
    given = [*tensors, None if q_norm is None else q_norm.weight]
    if k_norm is not q_norm:  # the comparison refuses a tensor that occurs twice
        given.append(None if k_norm is None else k_norm.weight)
    kinds = (
        (norm.weight_offset, norm.multiply_in_float32) if norm else None
        for norm in (q_norm, k_norm)
    )
    flags = (torch.is_grad_enabled(), interleaved, *kinds, *(x is None for x in given))
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
