"""One check per field of the spec, and one for the device, against what a backend declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnlib.capabilities.declaration import NOT_STATED, Capabilities
from attnlib.device import DeviceInfo
from attnlib.sizes import Sizes
from attnlib.spec import AttentionSpec, CudaGraphSupport

__all__ = ["CHECKS", "Reason", "unsupported_device_reasons", "unsupported_reasons"]


class Reason(str):
    """Why a backend does not support a spec, in words, with the field of the spec.

    Attributes:
        field: name of the `AttentionSpec` field; None if the reason is about no single field.
    """

    field: str | None

    def __new__(cls, text: str, field: str | None) -> Reason:
        reason = super().__new__(cls, text)
        reason.field = field
        return reason

    @classmethod
    def prefixed(cls, label: str, reason: str) -> Reason:
        """`label: reason`, about the same field."""
        return cls(f"{label}: {reason}", getattr(reason, "field", None))

    def __getnewargs__(self) -> tuple[str, str | None]:  # type: ignore[override]  # str has one
        return str(self), self.field


_Check = Callable[[AttentionSpec, Capabilities], "str | None"]


def _not_stated(name: str) -> str:
    return f"{name}: not stated by this backend, so not assumed"


def _join(values: Any) -> str:
    return (
        ", ".join(str(getattr(value, "value", value)).removeprefix("torch.") for value in values)
        or "none"
    )


def _flag(name: str, needed: Callable[[AttentionSpec], object], phrase: str) -> _Check:
    """Check of a feature that is on or off: unsupported if it is needed and not stated as True."""

    def check(spec: AttentionSpec, caps: Capabilities) -> str | None:
        value = getattr(caps, name)
        if not needed(spec) or value is True:
            return None
        return (
            _not_stated(name)
            if value is NOT_STATED
            else f"{phrase.format(spec=spec)}: not supported"
        )

    return check


def _member(name: str, get: Callable[[AttentionSpec], Any], label: str) -> _Check:
    """Check of a value that must be one of the stated ones."""

    def check(spec: AttentionSpec, caps: Capabilities) -> str | None:
        allowed, value = getattr(caps, name), get(spec)
        if allowed is NOT_STATED:
            return _not_stated(name)
        if value in allowed:
            return None
        limit = str(allowed) if isinstance(allowed, Sizes) else _join(allowed)
        return f"{label}={_join([value])} not supported (supported: {limit})"

    return check


def _check_head_size_v(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if spec.head_size_v == spec.head_size or spec.use_mla or caps.head_size_v_may_differ is True:
        return None
    if caps.head_size_v_may_differ is NOT_STATED:
        return _not_stated("head_size_v_may_differ")
    return f"head_size_v={spec.head_size_v} must equal head_size={spec.head_size}"


def _check_kv_cache_dtype(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if spec.kv_format.scales_in_page:
        return _member("kv_formats", lambda s: s.kv_format.name, "kv_cache_dtype")(spec, caps)
    if spec.kv_dtype == spec.dtype:
        return None  # the check of dtype covers a cache of the same dtype
    return _member("kv_cache_dtypes", lambda s: s.kv_dtype, "kv_cache_dtype")(spec, caps)


def _check_kv_scale_kind(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if not spec.is_kv_quantized or spec.kv_format.scales_in_page:
        return None
    return _member("kv_scale_kinds", lambda s: s.kv_scale_kind, "kv_scale_kind")(spec, caps)


def _check_layout(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if spec.kv_cache_layout is None or not spec.is_paged or "ANY" in (caps.kv_cache_layouts or ()):
        return None
    if spec.kv_format.scales_in_page:
        return None  # the format has its own pages, which `kv_formats` covers
    return _member("kv_cache_layouts", lambda s: s.kv_cache_layout, "kv_cache_layout")(spec, caps)


def _check_block_size(spec: AttentionSpec, caps: Capabilities) -> str | None:
    return (
        _member("block_sizes", lambda s: s.block_size, "block_size")(spec, caps)
        if spec.is_paged
        else None
    )


def _check_cudagraph(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if spec.cudagraph is CudaGraphSupport.NEVER:
        return None
    if caps.cudagraph is NOT_STATED:
        return _not_stated("cudagraph")
    if spec.cudagraph <= caps.cudagraph:
        return None
    return f"cudagraph={spec.cudagraph.name} not supported (up to {caps.cudagraph.name})"


CHECKS: Mapping[str, _Check] = {
    "num_heads": lambda spec, caps: (
        None
    ),  # any number: what can fail is the ratio, checked by num_kv_heads
    "num_kv_heads": _member("group_sizes", lambda s: s.group_size, "num_heads/num_kv_heads"),
    "head_size": _member("head_sizes", lambda s: s.head_size, "head_size"),
    "head_size_v": _check_head_size_v,
    "dtype": _member("dtypes", lambda s: s.dtype, "dtype"),
    "kv_cache_dtype": _check_kv_cache_dtype,
    "kv_scale_kind": _check_kv_scale_kind,
    "kv_rotation": lambda spec, caps: None,  # the layer rotates, in front of every backend
    "block_size": _check_block_size,
    "kv_cache_layout": _check_layout,
    "attn_type": _member("attn_types", lambda s: s.attn_type, "attn_type"),
    "mask_kind": _member("mask_kinds", lambda s: s.mask_kind, "mask_kind"),
    "sliding_window": _flag(
        "sliding_window", lambda s: s.sliding_window, "sliding_window={spec.sliding_window}"
    ),
    "window": _flag(
        "sliding_window", lambda s: s.window and not s.window.is_full, "window={spec.window}"
    ),
    "attention_chunk_size": _flag(
        "attention_chunks",
        lambda s: s.attention_chunk_size,
        "attention_chunk_size={spec.attention_chunk_size}",
    ),
    "logits_soft_cap": _flag(
        "logits_soft_cap", lambda s: s.logits_soft_cap, "logits_soft_cap={spec.logits_soft_cap}"
    ),
    "has_alibi": _flag("alibi", lambda s: s.has_alibi, "ALiBi slopes"),
    "has_sink": _flag("sink", lambda s: s.has_sink, "attention sinks"),
    "score_function": _flag(
        "score_function", lambda s: s.score_function, "score_function={spec.score_function}"
    ),
    "key_selection": _flag(
        "key_selection", lambda s: s.key_selection, "key_selection={spec.key_selection}"
    ),
    "compressed_entries": _flag(
        "compressed_entries",
        lambda s: s.compressed_entries,
        "compressed_entries={spec.compressed_entries}",
    ),
    "allow_fp8_queries": lambda spec, caps: None,  # a permission, which no backend has to use
    "use_mla": _flag("mla", lambda s: s.use_mla, "multi-head latent attention"),
    "needs_lse": _flag("lse", lambda s: s.needs_lse, "returning the LSE"),
    "kv_sharing": _flag("kv_sharing", lambda s: s.kv_sharing, "sharing another layer's cache"),
    "batch_invariant": _flag(
        "batch_invariant", lambda s: s.batch_invariant, "batch_invariant=True"
    ),
    "cudagraph": _check_cudagraph,
}
"""Spec field -> its check; a test compares the keys with the fields of `AttentionSpec`."""


def unsupported_device_reasons(device: DeviceInfo, caps: Capabilities) -> list[str]:
    """Why the device is not supported; empty if it is."""
    if caps.devices is NOT_STATED:
        return [_not_stated("devices")]
    if device.type not in caps.devices:
        return [f"device {device.type} not supported (supported: {_join(caps.devices)})"]
    if device.type != "cuda":
        return []
    if device.is_rocm:
        return [] if caps.rocm else ["ROCm devices: not supported"]
    if device.capability is None:
        unbounded = caps.min_capability is None and caps.max_capability is None
        return [] if unbounded else ["the compute capability of the device is unknown"]
    reasons = []
    if caps.min_capability is not None and device.capability < caps.min_capability:
        reasons.append(
            f"compute capability {_dotted(device.capability)} is below "
            f"{_dotted(caps.min_capability)}"
        )
    if caps.max_capability is not None and device.capability > caps.max_capability:
        reasons.append(
            f"compute capability {_dotted(device.capability)} is above "
            f"{_dotted(caps.max_capability)}"
        )
    return reasons


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def unsupported_reasons(spec: AttentionSpec, device: DeviceInfo, caps: Capabilities) -> list[str]:
    """All reasons why a backend with these capabilities does not support `spec` on `device`."""
    reasons = unsupported_device_reasons(device, caps)
    for field, check in CHECKS.items():
        reason = check(spec, caps)
        if reason is not None and reason not in reasons:
            reasons.append(Reason(reason, field))
    return reasons
