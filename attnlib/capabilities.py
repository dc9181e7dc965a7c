"""What a backend declares that it can do, and the one check that each field of the spec has.

Capabilities fail closed: a field that a backend leaves out is "not stated", and not stated is itself a reason to refuse. `unsupported_reasons` returns
every reason, each naming the value and the limit, so that nobody has to fix them one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from attnlib.device import DeviceInfo
from attnlib.sizes import Sizes
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind

__all__ = ["CHECKS", "NOT_STATED", "Capabilities", "Sizes", "unsupported_reasons"]


class _NotStated:
    """The value of a capability that a backend left out."""

    _instance: _NotStated | None = None

    def __new__(cls) -> _NotStated:
        cls._instance = cls._instance or super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "NOT_STATED"

    def __reduce__(self) -> str:
        return "NOT_STATED"

    def __bool__(self) -> bool:
        return False


NOT_STATED: Any = _NotStated()


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """A backend's declaration. Every field left out fails closed with the reason "not stated".

    Attributes:
        devices: torch device types that it runs on, such as ("cpu", "cuda").
        min_capability: lowest compute capability on CUDA (None: any).
        max_capability: highest one (None: any).
        rocm: runs on AMD devices.
        dtypes: dtypes of q, k, v and the output.
        kv_cache_dtypes: dtypes that its cache may store. A cache in the model's own dtype always needs that dtype to be listed too.
        kv_scale_kinds: granularities of the scales of a quantised cache, of "tensor" and "head"; () when it has no quantised cache.
        head_sizes: sizes of one query or key head.
        head_size_v_may_differ: values may have another size than keys.
        block_sizes: tokens in one block.
        kv_cache_layouts: layouts that it reads, best first; "ANY" stands for whatever strides.
        group_sizes: query heads per KV head.
        attn_types: places in a model.
        mask_kinds: masks before windows.
        sliding_window: sliding windows, and windows in the general form.
        attention_chunks: attention within chunks.
        logits_soft_cap, alibi, sink, mla, lse, kv_sharing, batch_invariant: what their names say.
        cudagraph: the most that a CUDA graph can hold.
        needs_finite_cache: unused cache elements must be finite (P5); allocation zero-fills, `explain` says so.
        deterministic: the same call twice gives the same bits (M8).
        allocates_in_forward: its kernels take scratch memory from torch's allocator at every call, which no declaration of bytes can prevent.
    """

    devices: tuple[str, ...] = NOT_STATED
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    rocm: bool = False
    dtypes: tuple[torch.dtype, ...] = NOT_STATED
    kv_cache_dtypes: tuple[torch.dtype, ...] = NOT_STATED
    kv_scale_kinds: tuple[str, ...] = NOT_STATED
    head_sizes: Sizes = NOT_STATED
    head_size_v_may_differ: bool = NOT_STATED
    block_sizes: Sizes = NOT_STATED
    kv_cache_layouts: tuple[str, ...] = NOT_STATED
    group_sizes: Sizes = NOT_STATED
    attn_types: tuple[AttentionType, ...] = NOT_STATED
    mask_kinds: tuple[MaskKind, ...] = NOT_STATED
    sliding_window: bool = NOT_STATED
    attention_chunks: bool = NOT_STATED
    logits_soft_cap: bool = NOT_STATED
    alibi: bool = NOT_STATED
    sink: bool = NOT_STATED
    mla: bool = NOT_STATED
    lse: bool = NOT_STATED
    kv_sharing: bool = NOT_STATED
    batch_invariant: bool = NOT_STATED
    cudagraph: CudaGraphSupport = NOT_STATED
    needs_finite_cache: bool = False
    deterministic: bool = True
    allocates_in_forward: bool = False

    def stated(self) -> dict[str, Any]:
        """The fields that were stated, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) is not NOT_STATED
        }


_Check = Callable[[AttentionSpec, Capabilities], "str | None"]


def _not_stated(name: str) -> str:
    return f"{name}: not stated by this backend, so not assumed"


def _words(values: Any) -> str:
    return (
        ", ".join(str(getattr(value, "value", value)).removeprefix("torch.") for value in values)
        or "none"
    )


def _flag(name: str, wanted: Callable[[AttentionSpec], object], phrase: str) -> _Check:
    """A feature that is on or off: refused when it is wanted and not declared."""

    def check(spec: AttentionSpec, caps: Capabilities) -> str | None:
        value = getattr(caps, name)
        if not wanted(spec) or value is True:
            return None
        return (
            _not_stated(name)
            if value is NOT_STATED
            else f"{phrase.format(spec=spec)}: not supported"
        )

    return check


def _member(name: str, asked: Callable[[AttentionSpec], Any], label: str) -> _Check:
    """A value that must be one of those declared."""

    def check(spec: AttentionSpec, caps: Capabilities) -> str | None:
        allowed, value = getattr(caps, name), asked(spec)
        if allowed is NOT_STATED:
            return _not_stated(name)
        if value in allowed:
            return None
        limit = str(allowed) if isinstance(allowed, Sizes) else _words(allowed)
        return f"{label}={_words([value])} not supported (supported: {limit})"

    return check


def _check_head_size_v(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if spec.head_size_v == spec.head_size or spec.use_mla or caps.head_size_v_may_differ is True:
        return None
    if caps.head_size_v_may_differ is NOT_STATED:
        return _not_stated("head_size_v_may_differ")
    return f"head_size_v={spec.head_size_v} must equal head_size={spec.head_size}"


def _check_kv_cache_dtype(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if spec.kv_dtype == spec.dtype:
        return None  # the dtype check speaks for a cache in the model's own dtype
    return _member("kv_cache_dtypes", lambda s: s.kv_dtype, "kv_cache_dtype")(spec, caps)


def _check_kv_scale_kind(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if not spec.is_kv_quantized:
        return None
    return _member("kv_scale_kinds", lambda s: s.kv_scale_kind, "kv_scale_kind")(spec, caps)


def _check_layout(spec: AttentionSpec, caps: Capabilities) -> str | None:
    if spec.kv_cache_layout is None or not spec.is_paged or "ANY" in (caps.kv_cache_layouts or ()):
        return None
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
    "use_mla": _flag("mla", lambda s: s.use_mla, "multi-head latent attention"),
    "needs_lse": _flag("lse", lambda s: s.needs_lse, "returning the LSE"),
    "kv_sharing": _flag("kv_sharing", lambda s: s.kv_sharing, "sharing another layer's cache"),
    "batch_invariant": _flag(
        "batch_invariant", lambda s: s.batch_invariant, "batch_invariant=True"
    ),
    "cudagraph": _check_cudagraph,
}
"""Spec field -> its check. A test compares the keys with the fields of `AttentionSpec`."""


def unsupported_device_reasons(device: DeviceInfo, caps: Capabilities) -> list[str]:
    """Why the device does not fit; empty when it does."""
    if caps.devices is NOT_STATED:
        return [_not_stated("devices")]
    if device.type not in caps.devices:
        return [f"device {device.type} not supported (supported: {_words(caps.devices)})"]
    if device.type != "cuda":
        return []
    if device.is_rocm:
        return [] if caps.rocm else ["ROCm devices: not supported"]
    if device.capability is None:
        unbounded = caps.min_capability is None and caps.max_capability is None
        return [] if unbounded else ["compute capability of the device could not be found out"]
    reasons = []
    if caps.min_capability is not None and device.capability < caps.min_capability:
        reasons.append(
            f"compute capability {_dotted(device.capability)} is below {_dotted(caps.min_capability)}"
        )
    if caps.max_capability is not None and device.capability > caps.max_capability:
        reasons.append(
            f"compute capability {_dotted(device.capability)} is above {_dotted(caps.max_capability)}"
        )
    return reasons


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def unsupported_reasons(spec: AttentionSpec, device: DeviceInfo, caps: Capabilities) -> list[str]:
    """Every reason why a backend with these capabilities cannot serve `spec` on `device`; empty when it can."""
    reasons = unsupported_device_reasons(device, caps)
    for check in CHECKS.values():
        reason = check(spec, caps)
        if reason is not None and reason not in reasons:
            reasons.append(reason)
    return reasons
