"""Checks of a layer call that read no device memory: types, shapes, dtypes, strides, devices.

They run before anything is written or launched, once per call signature and batch layout.
`attnlib.debug.validation` also reads values.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from attnlib.cache.storage import UNIT_SCALE, PagedKVCache
from attnlib.errors import ContractError, LayoutMismatchError
from attnlib.layer.metadata_checks import check_metadata, tensor_of
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer.plans import PlannedLayer

__all__ = [
    "check_cache_type",
    "check_call",
    "check_latent_scales",
    "per_head",
]

_log = logging.getLogger("attnlib")


def per_head(name: str, tensor: torch.Tensor, num_heads: int, head_size: int) -> torch.Tensor:
    """`[tokens, num_heads, head_size]` of a flat or per-head tensor; a view, no copy.

    Raises:
        ContractError: a flat tensor of another width.
    """
    if tensor.dim() != 2:
        return tensor  # `check_call` checks the rest
    if tensor.shape[1] != num_heads * head_size:
        raise ContractError(_wrong_shape(name, tensor, num_heads, head_size))
    return tensor.view(tensor.shape[0], num_heads, head_size)


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


def check_call(
    layer: PlannedLayer,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: Any,
    return_lse: bool,
) -> None:
    """Shapes, dtypes and devices of one call.

    Raises:
        ContractError: the message names the tensor, what it is and what it must be.
        LayoutMismatchError: the backend does not read the cache's memory layout.
    """
    spec = layer.spec
    check_metadata(layer, metadata)
    for name in ("query_start_loc", "seq_lens", "block_table"):
        lengths = tensor_of(metadata, name)
        if lengths is not None and lengths.device != query.device:
            raise ContractError(
                f"{name} is on {lengths.device}, query on {query.device}: build the batch for that "
                "device"
            )
    _check_tensor("query", query, (spec.num_heads, spec.head_size), spec.dtype, query.device)
    tokens = getattr(metadata, "num_actual_tokens", 0) or 0
    if query.shape[0] < tokens:
        raise ContractError(
            f"query has {query.shape[0]} rows, but the batch has {tokens} tokens", rule="M6"
        )
    if (key is None) != (value is None):
        given = "key" if key is None else "value"
        raise ContractError(f"{given} is None and the other is not: pass both or neither")
    if key is not None and value is not None:
        sizes = (spec.num_kv_heads, spec.head_size), (spec.num_kv_heads, spec.head_size_v)
        _check_tensor("key", key, sizes[0], spec.dtype, query.device)
        _check_tensor("value", value, sizes[1], spec.dtype, query.device)
        if key.shape[0] != value.shape[0]:
            raise ContractError(
                f"key has {key.shape[0]} rows and value {value.shape[0]}; they must agree"
            )
    for name, tensor in zip(("alibi_slopes", "sinks"), layer.impl.per_head_tensors, strict=True):
        if tensor is not None and tensor.device != query.device:
            raise ContractError(
                f"{name} is on {tensor.device}, query on {query.device}: move the layer with "
                f"layer.to({str(query.device)!r})"
            )
    if spec.score_function is not None:
        _check_score_tensors(layer, metadata, query.device)
    if cache is not None:
        _check_cache(layer, cache, key, query.device, metadata)
        if layer.spec.is_kv_quantized and key is not None:
            _report_unit_scales(layer, cache, metadata)
    elif spec.is_paged:
        raise ContractError(
            f"attn_type={spec.attn_type.value} attends through a cache: pass a PagedKVCache"
        )
    elif key is None:
        raise ContractError(
            f"attn_type={spec.attn_type.value} caches nothing, so key and value must be given with "
            "every call"
        )
    elif key.shape[0] < tokens:
        raise ContractError(f"key has {key.shape[0]} rows, but the batch has {tokens} tokens")
    if return_lse and layer.backend.capabilities.lse is not True:
        raise ContractError(
            f"backend {layer.backend.get_name()} cannot return the LSE: set needs_lse=True in the "
            "spec, so that selection finds a backend that can"
        )


def _report_unit_scales(layer: PlannedLayer, cache: PagedKVCache, metadata: Any) -> None:
    """Log a warning if the scales of a layer and of the cache that it writes are 1."""
    given = (layer.k_scale, layer.v_scale, cache.k_scale, cache.v_scale)
    are_one = all(isinstance(scale, float) and scale == UNIT_SCALE for scale in given)
    if are_one and not getattr(metadata, "enable_kv_scales_calculation", False):
        _warn_of_unit_scales(cache.dtype)


@functools.lru_cache(maxsize=8)  # once per dtype, not per layer
def _warn_of_unit_scales(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    _log.warning(
        "a cache of %s is written with k_scale = v_scale = 1: keys and values above %g saturate, "
        "and small ones lose precision; pass the scales of the checkpoint to the layer or its "
        "cache, or build the first batch with enable_kv_scales_calculation=True",
        dtype,
        largest,
    )


def _check_score_tensors(layer: PlannedLayer, metadata: Any, device: torch.device) -> None:
    """Whether the layer has the tensors of its score function in a form that kernels read, and all
    of its tensors are on one device."""
    function = layer.spec.score_function
    assert function is not None  # the caller has checked
    own = dict(zip(function.layer_tensors, layer.impl.layer_score_tensors, strict=True))
    function.check_tensors(own, function.layer_tensors, "layer")
    made_for = getattr(getattr(metadata, "spec", None), "score_function", function)
    if made_for != function and made_for is not None and function.batch_tensors:
        raise ContractError(
            f"metadata was built for score function {made_for}, the layer's spec has {function}: "
            "build it with the builder of this layer's group",
            rule="M10",
        )
    batch = getattr(metadata, "score_tensors", None) or {}
    if missing := [name for name in function.batch_tensors if name not in batch]:
        parts = [getattr(metadata, name, None) for name in ("prefill", "decode")]
        if not any(getattr(part, "score_tensors", None) for part in parts):
            raise ContractError(
                f"metadata has no batch tensor {missing[0]!r}, which score function {function} "
                "reads: build it with the builder of this layer's group",
                rule="M10",
            )
    for name, tensor in {**own, **batch}.items():
        if tensor.device != device:
            raise ContractError(
                f"{name} of score function {function} is on {tensor.device}, query on {device}: "
                "move it to the device of the layer",
                rule="M10",
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


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor.dim() != 3 or tensor.shape[1:] != heads:
        raise ContractError(_wrong_shape(name, tensor, *heads))
    if tensor.dtype != dtype:
        raise ContractError(f"{name} is {tensor.dtype}, the spec says {dtype}")
    if tensor.device != device:
        raise ContractError(
            f"{name} is on {tensor.device}, query on {device}: all tensors of a call must be on "
            "one device"
        )
    if tensor.stride(2) != 1 and tensor.shape[2] > 1:
        raise ContractError(
            f"{name} has stride {tensor.stride(2)} along the head; the last stride must be 1",
            rule="P9",
        )


def _wrong_shape(name: str, tensor: torch.Tensor, num_heads: int, head_size: int) -> str:
    return (
        f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, {num_heads}, {head_size}] "
        f"or [tokens, {num_heads * head_size}]"
    )


def _check_cache(
    layer: PlannedLayer,
    cache: PagedKVCache,
    key: torch.Tensor | None,
    device: torch.device,
    metadata: Any,
) -> None:
    spec = layer.spec
    for name, wanted in (
        ("num_kv_heads", spec.num_kv_heads),
        ("head_size", spec.head_size),
        ("head_size_v", spec.head_size_v),
        ("block_size", spec.block_size),
    ):
        if getattr(cache, name) != wanted:
            raise ContractError(
                f"cache has {name}={getattr(cache, name)}, the spec says {wanted}", rule="P1"
            )
    stored = spec.kv_format if spec.kv_format.scales_in_page else None
    if cache.dtype != spec.kv_dtype or cache.page_format != stored:
        found = cache.page_format.name if cache.page_format else cache.dtype
        raise ContractError(
            f"cache stores {found}, the spec says {stored.name if stored else spec.kv_dtype}",
            rule="P1",
        )
    if cache.device != device:
        raise ContractError(
            f"cache is on {cache.device}, query on {device}: all tensors of a call must be on one "
            "device"
        )
    if key is not None and cache.values_alias_keys and not spec.use_mla:
        raise ContractError(
            "key_cache and value_cache are the same memory, so values would overwrite keys: pass "
            "separate views, or set use_mla=True if values are a prefix of the keys",
            rule="P1",
        )
    if spec.use_mla and not cache.values_alias_keys:
        raise ContractError(
            "value_cache is not a prefix of key_cache, which use_mla requires: pass "
            "PagedKVCache.from_views(latents, latents[..., :head_size_v]), or set use_mla=False",
            rule="P10",
        )
    reads = layer.backend.capabilities.kv_cache_layouts or ("NHD",)
    # A backend checks the strides of views without a layout name; `kv_formats` covers pages.
    named = cache.layout is not None and stored is None
    if named and cache.layout not in reads and "ANY" not in reads:
        raise LayoutMismatchError(
            f"backend {layer.backend.get_name()} reads {', '.join(reads)}, but the cache is laid "
            f"out as {cache.layout}: allocate it with layout={reads[0]!r} [P2]"
        )
    slots = getattr(metadata, "slot_mapping", None)
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
