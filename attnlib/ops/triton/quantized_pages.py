"""The constants of attention kernels by the elements of the cache: pages that hold their scales
(M16), or chunks of a head. `page_write` has those of the write of pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.kv_dtype import KVFormat
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.page_tiles import page_shared_bytes
from attnlib.ops.triton.heuristics.tiles import Tile, key_chunks, next_power_of_2
from attnlib.ops.triton.kernels.page_formats import (
    PAGE_E4M3,
    PAGE_INT4,
    PAGE_INT8,
    PAGE_MXFP4,
    PAGE_NVFP4,
    PAGE_OPEN4,
    PAGE_OPEN8,
)
from attnlib.ops.triton.kernels.quant import KV_E4M3_BYTES, KV_PLAIN
from attnlib.ops.triton.launch.constants import attention_constants, compute_dtype
from attnlib.ops.triton.launch.number_code import is_looked_up, number_ptx
from attnlib.ops.triton.launch.settle import settle_keys

__all__ = ["element_constants", "page_kind", "page_words"]

_KINDS = {
    "int8_per_token_head": int(PAGE_INT8.value),
    "fp8_per_token_head": int(PAGE_E4M3.value),
    "int4_per_group": int(PAGE_INT4.value),
    "nvfp4": int(PAGE_NVFP4.value),
    "mxfp4": int(PAGE_MXFP4.value),
}
_UNUSED = ("D", "KV_KIND", "K_SCALE_KIND", "V_SCALE_KIND", "LATENT", "VEC_Q", "VEC_O")
"""Constants of chunks of a head."""
_LANES = 16
"""Least words of a tile's row: tensor cores multiply 16 elements at a time."""


def page_kind(stored: KVFormat) -> int:
    """The `PAGE_*` constant of a format.

    Raises:
        UnsupportedConfigError: an open format without a device function.
    """
    if not stored.is_open:
        return _KINDS[stored.name]
    if stored.number is None:
        raise UnsupportedConfigError(
            f"{stored.name} has no device function (KVFormat.number): use backend='torch'",
            backend="triton",
        )
    return int((PAGE_OPEN4 if stored.bits == 4 else PAGE_OPEN8).value)


def _numbers(keys: KVFormat, values: KVFormat, packed: bool = False) -> dict[str, Any]:
    """The device functions of open formats, and what identifies their code; PTX code in place of
    those that have it if numbers may be `packed`."""
    found: list[Any] = []
    for function, bits in ((keys.number, keys.bits), (values.number, values.bits)):
        code = None if function is None or not packed else number_ptx(function, bits)
        if not code and function is not None:
            from attnlib.ops.triton.launch.score_compile import compile_score

            code = compile_score(function, "triton").apply
            code.is_looked_up, code.bits = is_looked_up(function, bits), bits
        found.append(code)
    named = [one for one in found if one is not None and not isinstance(one, str)]
    settle_keys(*named)
    keys_of_code = tuple(getattr(one, "cache_key", "") for one in named)  # "": interpreted
    return {"NUMBER": found[0], "V_NUMBER": found[1], "NUMBER_KEYS": keys_of_code}


def element_constants(call: AttentionCall, tile: Tile) -> dict[str, Any]:
    """The compile-time arguments that follow from the elements of the cache and from the features
    of a call; for pages that hold their scales, words of a head in place of its chunks.

    Args:
        call: over pages, or over packed keys.
        tile: the tile of the attention kernel.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which the tile does not fit the device.
    """
    shape = call.shape
    if shape.page_format is None:
        element = shape.query_dtype.itemsize
        chunks = key_chunks(shape.head_sizes, tile, element, call.limits.products, shape.latent)
        return {**attention_constants(call), **chunks}
    _check_bytes(tile, call)
    return _page_constants(call, shape.page_format)


def _page_constants(call: AttentionCall, stored: KVFormat) -> dict[str, Any]:
    """`element_constants` of pages that hold their scales."""
    params = call.params
    assert isinstance(params.k_scale, Tensor) and isinstance(params.v_scale, Tensor)
    shared = attention_constants(replace(call, params=replace(params, k_scale=1.0, v_scale=1.0)))
    words, padded = page_words(call.key, params.k_scale, stored)
    values = call.shape.value_format or stored
    words_v, padded_v = page_words(call.value, params.v_scale, values)
    is_mxfp4 = page_kind(stored) == PAGE_MXFP4.value
    is_short, capability = call.shape.query_dtype.itemsize == 2, call.limits.capability
    ptx = 0
    is_open = stored.is_open or values.is_open
    has_ptx = capability >= (8, 0) and is_short
    if has_ptx and not stored.elements_per_group:
        ptx = 89 if call.limits.has_fp8 else 80
    # float16 holds the elements, and takes fewer conversions than bfloat16. Elements of mxfp4 times
    # their scales may exceed it, and are exact in bfloat16.
    kind = (KV_PLAIN if is_mxfp4 else KV_E4M3_BYTES).value
    return {name: value for name, value in shared.items() if name not in _UNUSED} | {
        "DV": call.shape.head_size_v,
        "WORDS": words,
        "WORDS_PAD": padded,
        "DV_WORDS": words_v,
        "DV_PAD": padded_v,
        "PAGE_KIND": page_kind(stored),
        "V_PAGE_KIND": page_kind(values),
        **(_numbers(stored, values, has_ptx) if is_open else {}),
        "COMPUTE": compute_dtype(call.shape.query_dtype, kind),
        "PTX": ptx,
        "VEC_K": max(1, shared["VEC_K"] // 2),
        "VEC_V": max(1, shared["VEC_V"] // 2),
    }


def page_words(view: Tensor, scales: Tensor, stored: KVFormat) -> tuple[int, int]:
    """16-bit words of a head, and of a row of a tile.

    Raises:
        ContractError: heads that are not whole words, or scales that cannot be loaded at once.
    """
    size, start = view.shape[3], view.data_ptr() % 2
    if size % 2 or start or any(stride % 2 for stride in view.stride()[:3]):
        raise ContractError(
            f"a cache of {stored.name} has {size} bytes per head and strides {view.stride()}, and "
            f"starts at {start} modulo 2; the Triton kernels read words of two bytes: use an even "
            "head size and an even address, or backend='torch'",
            rule="P13",
        )
    together, unit = max(1, stored.groups_per_head), stored.scale_unit
    start = scales.data_ptr() % unit
    if start or any(stride % together for stride in scales.stride()[:3]):
        raise ContractError(
            f"scales of {stored.name} have strides {scales.stride()} and start at {start} modulo "
            f"{unit}; strides must be multiples of {together} and the address one of {unit}, so "
            "that the scales of a head are loaded at once",
            rule="P13",
        )
    return size // 2, max(_LANES, next_power_of_2(size // 2))


def _check_bytes(tile: Tile, call: AttentionCall) -> None:
    """Refuse a tile that does not fit the chip.

    Raises:
        UnsupportedConfigError: the message names the bytes that it needs.
    """
    (head_size, head_size_v), stored = call.shape.head_sizes, call.shape.page_format
    assert stored is not None
    sizes = (head_size, head_size_v, call.shape.query_dtype.itemsize)
    values, limit = call.shape.value_format, call.limits
    need = page_shared_bytes(tile, stored, *sizes, limit.products, values)
    if need > limit.shared_memory:
        raise UnsupportedConfigError(
            f"head sizes {head_size} and {head_size_v} of {stored.name} need {need} bytes of "
            f"shared memory, the device has {limit.shared_memory}: use the torch backend",
            backend="triton",
        )
