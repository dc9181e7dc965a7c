"""Checks of a spec when it is made: values that no attention layer can have."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from attnlib.errors import ContractError
from attnlib.kv_dtype import KV_FORMAT_PAIRS, format_pair, is_pair
from attnlib.sizes import MAX_LOGITS_SOFT_CAP
from attnlib.spec.feature_checks import check_features
from attnlib.spec.kinds import Window

if TYPE_CHECKING:
    from attnlib.spec.attention_spec import AttentionSpec

__all__ = ["as_kind", "as_window", "check_dtype", "check_spec"]

_Kind = TypeVar("_Kind", bound=Enum)


_FLAGS = (
    "has_alibi",
    "has_sink",
    "token_sinks",
    "allow_fp8_queries",
    "use_mla",
    "needs_lse",
    "kv_sharing",
    "batch_invariant",
)


def check_spec(spec: AttentionSpec) -> None:
    """Check all fields of a spec.

    Raises:
        ContractError: no attention layer can have this value, or these values together.
    """
    _check_sizes(spec)
    _check_flags(spec)
    _check_mask(spec)
    _check_dtypes(spec)
    check_features(spec)


def as_kind(name: str, value: Any, kind: type[_Kind]) -> _Kind:
    """A member of an enumeration, from itself or its value.

    Raises:
        ContractError: no member has this value; the message lists those that are.
    """
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(str(member.value) for member in kind)
        raise ContractError(f"{name}={value!r} is not known: give one of {allowed}") from None


def as_window(window: Any) -> Window | None:
    """A `Window`, from itself or a pair.

    Raises:
        ContractError: not a pair, or a side that is neither None nor an integer of at least 0.
    """
    if window is None:
        return None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ContractError(
            f"window={window!r} must be a pair (left, right) of numbers of keys, each None for all",
            rule="M2",
        ) from None
    for side, value in (("left", left), ("right", right)):
        if value is not None and not _is_integer(value, 0):
            raise ContractError(
                f"window {side}={value!r} must not be negative, and an integer; 0 means no key on "
                "this side, None means all",
                rule="M2",
            )
    return Window(left, right)


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_dtype(dtype: Any) -> None:
    """Whether a layer may compute in a dtype.

    Raises:
        ContractError: it is no floating-point dtype of at least 16 bits.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ContractError(
            f"dtype={dtype!r} must be a floating-point torch dtype of at least 16 bits, such as "
            "torch.bfloat16"
        )


def _check_sizes(spec: AttentionSpec) -> None:
    for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v", "block_size"):
        value = getattr(spec, name)
        if not _is_integer(value, 1):
            raise ContractError(f"{name}={value!r} must be an integer of at least 1")
    if spec.num_heads % spec.num_kv_heads:
        raise ContractError(
            f"num_heads={spec.num_heads} is not a multiple of "
            f"num_kv_heads={spec.num_kv_heads}: all KV heads must have the same number of "
            f"query heads"
        )
    if spec.use_mla and (spec.num_kv_heads != 1 or spec.head_size_v > spec.head_size):
        raise ContractError(
            f"use_mla needs num_kv_heads=1 and head_size_v <= head_size (the value is a prefix "
            f"of the key), got num_kv_heads={spec.num_kv_heads}, "
            f"head_size_v={spec.head_size_v}, head_size={spec.head_size}"
        )


def _check_flags(spec: AttentionSpec) -> None:
    for name in _FLAGS:
        value = getattr(spec, name)
        if not isinstance(value, bool):
            raise ContractError(f"{name}={value!r} must be True or False")


def _check_mask(spec: AttentionSpec) -> None:
    if spec.sliding_window is not None and spec.window is not None:
        raise ContractError(
            f"sliding_window={spec.sliding_window} and window={tuple(spec.window)} are both "
            f"given: give one of them"
        )
    if spec.sliding_window is not None and not _is_integer(spec.sliding_window, 1):
        raise ContractError(
            f"sliding_window={spec.sliding_window!r} must be at least 1 (1 means the query's own "
            f"key only), and an integer; None for no window",
            rule="M2",
        )
    if spec.attention_chunk_size is not None and not _is_integer(spec.attention_chunk_size, 1):
        raise ContractError(
            f"attention_chunk_size={spec.attention_chunk_size!r} must be an integer of at least "
            "1, or None for no chunks"
        )
    cap = spec.logits_soft_cap
    if cap is not None and not (_is_number(cap) and 0 < cap <= MAX_LOGITS_SOFT_CAP):
        raise ContractError(
            f"logits_soft_cap={cap!r} must be above 0 and at most {MAX_LOGITS_SOFT_CAP:.0f}, or "
            "None for no soft cap",
            rule="M3",
        )


def _check_formats(spec: AttentionSpec) -> None:
    """The formats of keys and values, by themselves and together."""
    keys, values = spec.kv_format, spec.value_format
    own = "kv_cache_dtype" if spec.value_cache_dtype is None else "value_cache_dtype"
    for name, field, stored in (
        ("head_size", "kv_cache_dtype", keys),
        ("head_size_v", own, values),
    ):
        if getattr(spec, name) % stored.head_size_multiple:
            raise ContractError(
                f"{name}={getattr(spec, name)} must be a multiple of "
                f"{stored.head_size_multiple} for {field}={stored.name}",
                rule="M16",
            )
    pair = format_pair(keys, values)
    if not is_pair(keys, values):
        pairs = "; ".join(KV_FORMAT_PAIRS).replace("plain", "auto")
        raise ContractError(
            f"kv_cache_dtype={keys.name} with value_cache_dtype={values.name}: no cache combines "
            f"them; leave value_cache_dtype out, or use one of {pairs}",
            rule="M16",
        )
    if spec.use_mla and (spec.scales_in_page or pair is not None):
        field, stored = ("kv_cache_dtype", keys) if keys.scales_in_page else (own, values)
        raise ContractError(
            f"{field}={stored.name} stores keys and values separately, and use_mla "
            "stores them once: use fp8, or the dtype of the model",
            rule="M16",
        )


def _check_dtypes(spec: AttentionSpec) -> None:
    check_dtype(spec.dtype)
    _check_formats(spec)
    if spec.kv_cache_layout is not None and not isinstance(spec.kv_cache_layout, str):
        raise ContractError(
            f"kv_cache_layout={spec.kv_cache_layout!r} must be the name of a layout, or None",
            rule="P2",
        )
    if spec.kv_scale_kind not in ("tensor", "head"):
        raise ContractError(
            f"kv_scale_kind={spec.kv_scale_kind!r} must be 'tensor' or 'head'", rule="M9"
        )
