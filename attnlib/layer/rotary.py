"""Calls of `Attention.rotate_and_write_kv`: checks once per kind of call, then the backend's
operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad

from attnlib.backends.base import AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.instrumentation import ENVIRONMENT, VALIDATE_KEY, checker_for_level
from attnlib.layer.cache_checks import check_cache_type
from attnlib.layer.call import LayerCall
from attnlib.layer.checks import check_call, refuse_gradients
from attnlib.layer.metadata_checks import check_addresses, check_metadata_type
from attnlib.layer.operator import rotate_opaquely
from attnlib.layer.plans import scales_agree
from attnlib.layer.scales import agree_on_scales, calculate_scales
from attnlib.layer.tensor_checks import check_tensor_types
from attnlib.metadata.base import AttentionMetadata
from attnlib.ops.rotary import HeadNorm, check_rotation
from attnlib.ops.signature import tensor_check
from attnlib.spec import AttentionType

if TYPE_CHECKING:
    from attnlib.layer.attention import Attention

__all__ = ["rotate_and_write_kv"]


def rotate_and_write_kv(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: AttentionMetadata,
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
    if not isinstance(metadata, AttentionMetadata):
        check_metadata_type(layer, metadata)  # raises
    check_tensor_types(query, key, value)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and not isinstance(norm, HeadNorm):
            raise ContractError(
                f"{name} is a {type(norm).__name__}; it must be an attnlib.ops.HeadNorm: pass "
                f"HeadNorm(weight, eps=...)",
                rule="P11",
            )
    heads = LayerCall(query, key, value, cache, metadata).per_head(layer.spec)
    call = (query, key, value, cos, sin, interleaved, q_norm, k_norm)
    known = _find_checked(layer, metadata.plans, cache, call)
    if known is None:
        _check(layer, heads)
        check_rotation("query", heads.query, cos, sin, q_norm)
        if heads.key is not None:
            check_rotation("key", heads.key, cos, sin, k_norm)
        if metadata.enable_kv_scales_calculation:
            out = _with_new_scales(layer, heads, (cos, sin, interleaved, q_norm, k_norm))
            return out.view(query.shape) if query.dim() == 2 else out
    assert cache is not None  # `_check` refuses a layer without one
    if known is None and not scales_agree(layer, cache):
        agree_on_scales(layer, cache)
    if VALIDATE_KEY in ENVIRONMENT and (checker := checker_for_level()) is not None:
        checker(layer, *heads[:5])
    slots = metadata.slot_mapping if layer.writes else None
    rows = heads[:3] if slots is not None else (heads.query, None, None)
    if known is None:
        known = _CheckedCall.of(layer, cache, call, rows, slots)
        if known.check is not None:
            metadata.plans[_CHECKED] = known
    if known.run is not None:
        out = known.run(*rows, cache, cos, sin, q_norm, k_norm)
    else:
        norms = {"q_norm": q_norm, "k_norm": k_norm}
        out = _hook(layer)(*rows, cache, slots, cos, sin, interleaved=interleaved, **norms)
    return out.view(query.shape) if query.dim() == 2 else out


def _hook(layer: Attention) -> Callable[..., torch.Tensor]:
    """The impl's `rotate_and_write_kv`, or the base class's where the impl replaced `write_kv`."""
    impl = layer.impl
    if impl.group.has_rotary_write:
        return impl.rotate_and_write_kv
    return functools.partial(AttentionImpl.rotate_and_write_kv, impl)


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
                *rows,
                cache,
                slots,
                cos,
                sin,
                interleaved=interleaved,
                q_norm=q_norm,
                k_norm=k_norm,
            )
        return cls(group, cache.signature, flags, tensor_check(*tensors), run)


def _find_checked(
    layer: Attention, plans: Any, cache: PagedKVCache | None, call: tuple[Any, ...]
) -> _CheckedCall | None:
    """The last checked call, if this one is like it."""
    known: _CheckedCall | None = None if plans is None else plans.get(_CHECKED)
    if known is None or known.check is None or cache is None or forward_ad._current_level >= 0:
        return None  # no comparison sees a tangent
    flags, tensors = _split(call)
    same = known.group is layer.impl.group and known.cache_signature is cache.signature
    if same and flags == known.flags and known.check(*tensors) and scales_agree(layer, cache):
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


def _check(layer: Attention, call: LayerCall) -> None:
    """What does not depend on angles and norms.

    Args:
        layer: of the call.
        call: per head.

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
    refuse_gradients(call.query, call.key, call.value)
    check_call(layer, call)
    if call.key is not None and call.key.shape[0] != call.query.shape[0]:
        raise ContractError(
            f"query has {call.query.shape[0]} rows and key {call.key.shape[0]}; each token has one "
            "row in both",
            rule="P11",
        )
    if call.cache is not None and call.cache.device.type == "cpu":
        check_addresses(call.metadata, call.cache)


def _with_new_scales(layer: Attention, call: LayerCall, rotation: tuple[Any, ...]) -> torch.Tensor:
    """The separate operations, for a batch from which KV scales are computed: they are those of the
    rotated keys, which therefore exist before the write.

    Args:
        layer: of the call.
        call: per head.
        rotation: cos, sin, interleaved, q_norm, k_norm.
    """
    cos, sin, interleaved, q_norm, k_norm = rotation
    (query, key, value, cache, metadata), impl = call[:5], layer.impl
    hook = AttentionImpl.rotate_and_write_kv
    kind = {"interleaved": interleaved}
    assert cache is not None  # `_check` refuses a layer without one
    if key is not None and value is not None:
        rotated = hook(impl, key, None, None, cache, None, cos, sin, q_norm=k_norm, **kind)
        calculate_scales(layer, rotated, value, cache, metadata.slot_mapping)
        if not scales_agree(layer, cache):
            agree_on_scales(layer, cache)
        if layer.writes and metadata.slot_mapping is not None:
            impl.write_kv(rotated, value, cache, metadata.slot_mapping)
    return hook(impl, query, None, None, cache, None, cos, sin, q_norm=q_norm, **kind)
