"""Checks of the cache of a layer call, and of the slots that the call writes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from attnlib.cache.overlap import check_written, elements_overlap
from attnlib.cache.storage import UNIT_SCALE, PagedKVCache
from attnlib.errors import ContractError, LayoutMismatchError
from attnlib.layer.call import LayerCall
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer.attention import Attention

__all__ = [
    "check_aliasing",
    "check_cache",
    "check_cache_type",
    "check_latent_scales",
    "unreported_scales",
]

_log = logging.getLogger("attnlib")
_reports_scales = ContextVar("attnlib_reports_scales", default=True)


def check_cache_type(cache: object) -> None:
    """Whether a cache is a `PagedKVCache`, or None.

    Raises:
        ContractError: it is of another type.
    """
    if cache is not None and not isinstance(cache, PagedKVCache):
        raise ContractError(
            f"cache is a {type(cache).__name__}; it must be a PagedKVCache: wrap existing tensors "
            "with PagedKVCache.from_views(key_cache, value_cache)"
        )


def check_cache(layer: Attention, cache: PagedKVCache, call: LayerCall) -> None:
    """Whether a cache has the form that the spec declares, in a layout that the backend reads, and
    the call has slots for its keys.

    Args:
        layer: of the call.
        cache: of the call.
        call: per head.

    Raises:
        ContractError: the message names what the cache is and what it must be.
        LayoutMismatchError: the backend does not read the cache's memory layout.
    """
    _check_form(layer.spec, cache, call.query.device)
    check_aliasing(layer.spec, cache, call.key)
    _check_layout(layer, cache)
    _check_slots(layer, call)
    if layer.spec.is_kv_quantized and call.key is not None:
        _report_unit_scales(layer, cache, call)


def _check_form(spec: AttentionSpec, cache: PagedKVCache, device: torch.device) -> None:
    for name, wanted in (
        ("num_kv_heads", spec.num_kv_heads),
        ("head_size", spec.head_size),
        ("head_size_v", spec.head_size_v),
        ("block_size", spec.block_size),
    ):
        if getattr(cache, name) != wanted:
            chosen_late = "; or call layer.set_block_size and make the builders again"
            raise ContractError(
                f"cache has {name}={getattr(cache, name)}, the spec says {wanted}: allocate it "
                f"with the spec of the layer{chosen_late if name == 'block_size' else ''}",
                rule="P1",
            )
    formats = (spec.kv_format, spec.value_format)
    stored = tuple(one if one.scales_in_page else None for one in formats)
    dtypes = (cache.key_cache.dtype, cache.value_cache.dtype)
    if dtypes != tuple(one.dtype for one in formats) or cache.page_formats != stored:
        names = ",".join(dict.fromkeys(one.name for one in formats))
        if names == cache.format_name:
            names += " of another version or registration: allocate the cache again"
        else:
            names += ": allocate it with the spec of the layer"
        raise ContractError(f"cache stores {cache.format_name}, the spec says {names}", rule="P1")
    if cache.rotation != spec.kv_rotation:
        raise ContractError(
            f"cache has rotation={cache.rotation}, the spec says kv_rotation={spec.kv_rotation}: "
            "all layers of a cache rotate alike; allocate it with this spec, or assign "
            "cache.rotation",
            rule="P15",
        )
    if cache.device != device:
        raise ContractError(
            f"cache is on {cache.device}, query on {device}: all tensors of a call must be on one "
            "device"
        )


def check_aliasing(spec: AttentionSpec, cache: PagedKVCache, key: torch.Tensor | None) -> None:
    """Whether keys, values and tokens of a cache share memory as its layer wants it.

    Args:
        spec: of the layer.
        cache: of a call.
        key: of the call; None where nothing is written.

    Raises:
        ContractError: they do not.
    """
    if key is not None and cache.values_alias_keys and not spec.use_mla:
        raise ContractError(
            "key_cache and value_cache are the same memory, so values would overwrite keys: pass "
            "separate views, or set use_mla=True if values are a prefix of the keys",
            rule="P1",
        )
    if key is not None:
        _check_tokens(cache)
    if spec.use_mla and not cache.values_alias_keys:
        raise ContractError(
            "value_cache is not a prefix of key_cache, which use_mla requires: pass "
            "PagedKVCache.from_views(latents, latents[..., :head_size_v]), or set use_mla=False",
            rule="P10",
        )


def _check_tokens(cache: PagedKVCache) -> None:
    """Whether each token has memory of its own, in a cache that is written."""
    signature, views = cache.signature, (cache.key_cache, cache.value_cache)
    if signature.tokens_overlap is None:
        signature.tokens_overlap = any(map(elements_overlap, views))
    if signature.tokens_overlap:
        check_written(key_cache=cache.key_cache, value_cache=cache.value_cache)  # raises


def _check_layout(layer: Attention, cache: PagedKVCache) -> None:
    reads = layer.backend.capabilities.kv_cache_layouts or ("NHD",)
    stored = layer.spec.scales_in_page
    # A backend checks the strides of views without a layout name; `kv_formats` covers pages.
    named = cache.layout is not None and not stored
    if named and cache.layout not in reads and "ANY" not in reads:
        raise LayoutMismatchError(
            f"backend {layer.backend.get_name()} reads {', '.join(reads)}, but the cache is laid "
            f"out as {cache.layout}: allocate it with layout={reads[0]!r} [P2]"
        )


def _check_slots(layer: Attention, call: LayerCall) -> None:
    key, device = call.key, call.query.device
    slots = call.metadata.slot_mapping
    if slots is None:
        if key is not None and layer.writes:
            raise ContractError(
                "key and value were given, but the batch has no slot_mapping to write them to: "
                "build it with a block table, or pass None for both",
                rule="P4",
            )
        return
    if slots.dtype != torch.int64:
        raise ContractError(
            f"slot_mapping is {slots.dtype}; it must be int64, because a pool may have more than "
            "2^31 slots",
            rule="P4",
        )
    if slots.device != device:
        raise ContractError(
            f"slot_mapping is on {slots.device}, query on {device}: build the batch for that device"
        )
    if key is not None and layer.writes and key.shape[0] < slots.shape[0]:
        raise ContractError(
            f"slot_mapping names {slots.shape[0]} tokens, but key has {key.shape[0]} rows",
            rule="P4",
        )


@contextmanager
def unreported_scales() -> Iterator[None]:
    """No warning of scales of 1 inside: of calls that write nothing, before the scales are set."""
    token = _reports_scales.set(False)
    try:
        yield
    finally:
        _reports_scales.reset(token)


def _report_unit_scales(layer: Attention, cache: PagedKVCache, call: LayerCall) -> None:
    """Log a warning if the scales of a layer and of the cache that it writes are 1."""
    given = (layer.k_scale, layer.v_scale, cache.k_scale, cache.v_scale)
    are_one = all(isinstance(scale, float) and scale == UNIT_SCALE for scale in given)
    if are_one and _reports_scales.get() and not call.metadata.enable_kv_scales_calculation:
        _warn_of_unit_scales(cache.dtype)


@functools.lru_cache(maxsize=8)  # once per dtype, not per layer
def _warn_of_unit_scales(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    _log.warning(
        "a cache of %s is written with k_scale = v_scale = 1: keys and values above %g saturate, "
        "and small ones lose precision; pass the scales of the checkpoint to the layer or its "
        "cache, or set metadata.enable_kv_scales_calculation = True in the first step",
        dtype,
        largest,
    )


def check_latent_scales(spec: AttentionSpec, cache: PagedKVCache) -> None:
    """Values that are a prefix of the keys (MLA) are stored once, with one scale.

    Raises:
        ContractError: the scales of keys and values of a quantized cache differ.
    """
    k_scale, v_scale = cache.k_scale, cache.v_scale
    if not (spec.use_mla and spec.is_kv_quantized) or k_scale is v_scale:
        return
    # Two tensors are not compared by value, which would wait for a GPU.
    numbers = isinstance(k_scale, float) and isinstance(v_scale, float)
    if not numbers or k_scale != v_scale:
        raise ContractError(
            f"k_scale={k_scale} and v_scale={v_scale}, but values are a prefix of the keys "
            "(use_mla) and are stored once: give the same number or the same tensor for both",
            rule="M9",
        )
