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
from attnlib.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer_plans import PlannedLayer

__all__ = [
    "check_addresses",
    "check_cache_type",
    "check_call",
    "check_latent_scales",
    "check_metadata",
    "check_selected_keys",
    "per_head",
]

_log = logging.getLogger("attnlib")

_SAME_IN_METADATA = ("block_size", "num_heads", "num_kv_heads", "head_size", "head_size_v")


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


def check_metadata(layer: PlannedLayer, metadata: Any) -> None:
    """Whether `metadata` was made by a builder of the layer's backend, for such layers.

    Raises:
        ContractError: it is of another type, or made for another spec.
    """
    name, expected = layer.backend.get_name(), layer.backend.get_metadata_cls()
    if not isinstance(metadata, expected):
        raise ContractError(
            f"metadata is a {type(metadata).__name__}; backend {name} needs the "
            f"{expected.__name__} that its builder makes: "
            f"layer.backend.make_builder(spec, device).build(0, common_attn_metadata)"
        )
    made_for = getattr(metadata, "spec", None)
    if made_for is None:
        return
    for field in _SAME_IN_METADATA:
        theirs, ours = getattr(made_for, field), getattr(layer.spec, field)
        if theirs != ours:
            raise ContractError(
                f"metadata was built for {field}={theirs}, the layer's spec has {ours}: build it "
                "with the builder of this layer's group"
            )
    by_spec = getattr(metadata, "causal_from_spec", False)
    if by_spec and made_for.is_causal != layer.spec.is_causal:
        raise ContractError(
            f"metadata was built for attn_type={made_for.attn_type.value}, the layer's spec has "
            f"attn_type={layer.spec.attn_type.value}, and the batch leaves causality to the spec: "
            "build it with the builder of this layer's group",
            rule="M1",
        )


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


def check_addresses(metadata: Any, cache: PagedKVCache) -> None:
    """Whether block ids and slots of a batch on the CPU are inside the cache. Elsewhere reading
    them would synchronize, and ATTNLIB_VALIDATE=1 does.

    Raises:
        ContractError: the message names the tensor, the index and the value.
    """
    table, seq_lens = _tensor_of(metadata, "block_table"), _tensor_of(metadata, "seq_lens")
    if table is not None and seq_lens is not None and table.numel():
        _check_block_ids(table, seq_lens, cache)
    slots = _tensor_of(metadata, "slot_mapping")
    if slots is not None and slots.numel():
        least, most = slots.aminmax()
        if least < -1 or most >= cache.num_slots:
            token = int(((slots < -1) | (slots >= cache.num_slots)).int().argmax())
            raise ContractError(
                f"slot_mapping[{token}]={slots[token]} is outside the cache of {cache.num_slots} "
                "slots (-1 writes nothing)",
                rule="P4",
            )


def _tensor_of(metadata: Any, name: str) -> torch.Tensor | None:
    """A tensor of the metadata. A plug-in's metadata may keep a list or nothing under a name."""
    found = getattr(metadata, name, None)
    return found if isinstance(found, torch.Tensor) else None


def _check_block_ids(table: torch.Tensor, seq_lens: torch.Tensor, cache: PagedKVCache) -> None:
    """Ids of blocks that a request reads; entries past its end may hold anything (P3)."""
    if int(seq_lens.max()) > table.shape[1] * cache.block_size:
        request = int(seq_lens.argmax())
        raise ContractError(
            f"block_table row {request} has {table.shape[1]} entries, but seq_lens[{request}]="
            f"{seq_lens[request]} needs {-(-int(seq_lens[request]) // cache.block_size)} blocks of "
            f"{cache.block_size} tokens",
            rule="P3",
        )
    least, most = table.aminmax()
    if least >= 0 and most < cache.num_blocks:
        return
    first_position = torch.arange(table.shape[1]) * cache.block_size
    wrong = (first_position < seq_lens[:, None]) & ((table < 0) | (table >= cache.num_blocks))
    if bool(wrong.any()):
        request, column = wrong.nonzero()[0].tolist()
        raise ContractError(
            f"block_table[{request}][{column}]={table[request, column]} is outside the pool of "
            f"{cache.num_blocks} blocks (0 to {cache.num_blocks - 1})",
            rule="P3",
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
        lengths = _tensor_of(metadata, name)
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


def check_selected_keys(
    spec: AttentionSpec, query: torch.Tensor, metadata: Any, selected_keys: SelectedKeys | None
) -> None:
    """Whether a call passes lists of selected keys of the form that the spec declares (M11).

    Raises:
        ContractError: lists are missing, given without `spec.key_selection`, or of another form.
    """
    selection = spec.key_selection
    if selection is None and selected_keys is None:
        return
    if selection is None or selected_keys is None:
        given = "missing" if selected_keys is None else "given"
        raise ContractError(
            f"selected_keys is {given}, but the spec has key_selection={selection}: a call passes "
            "lists exactly when the spec declares their form",
            rule="M11",
        )
    if not isinstance(selected_keys, SelectedKeys):
        raise ContractError(
            f"selected_keys is a {type(selected_keys).__name__}; it must be an "
            "attnlib.key_selection.SelectedKeys",
            rule="M11",
        )
    starts = _tensor_of(metadata, "query_start_loc")
    selected_keys.check(
        selection,
        spec.num_heads,
        spec.num_kv_heads,
        0 if starts is None else starts.shape[0] - 1,
        getattr(metadata, "num_actual_tokens", 0) or 0,
        query.device,
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
    if cache.dtype != spec.kv_dtype:
        raise ContractError(f"cache stores {cache.dtype}, the spec says {spec.kv_dtype}", rule="P1")
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
    named = cache.layout is not None  # a backend checks the strides of views without a layout name
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
