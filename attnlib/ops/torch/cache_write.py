"""Write this step's keys and values to their slots (P4, P7).

A device must skip tokens without a synchronization. Boolean indexing would wait for the number of
selected tokens, and writing old content back would race with the token that owns the slot. A token
that is skipped therefore repeats the write of the first token that has a slot: the same value to
the same slot, so that the order of the writes does not matter and no other slot changes. If no
token has a slot, the first slot of the cache is rewritten with its own bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlib.kv_dtype import KVFormat, page_format
from attnlib.kv_rotation import KVRotation
from attnlib.ops.addresses import check_slot_values
from attnlib.ops.checks import check_slots, check_writable
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.scales import check_scale
from attnlib.ops.torch.hadamard import rotate_heads
from attnlib.ops.torch.quant import is_quantized, quantize

__all__ = ["write_kv"]


@torch.no_grad()
def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    k_format: KVFormat | None = None,
    v_format: KVFormat | None = None,
    rotation: KVRotation | None = None,
) -> None:
    """Write `key[t]` and `value[t]` to slot `slot_mapping[t]` for each t with a slot >= 0.

    Args:
        key: `[T', Hkv, D]` with T' >= T; rows past T are not written.
        value: `[T', Hkv, Dv]`, likewise.
        key_cache: `[B, N, Hkv, D]`, any strides; may share memory with `value_cache`.
        value_cache: `[B, N, Hkv, Dv]`, any strides. If it is a prefix of `key_cache` (P10), only
            the keys are written and `value` is not read.
        slot_mapping: `[T]` int64, slot = block * N + offset; a negative slot writes nothing. If two
            tokens have one slot, either may be stored.
        k_scale: real key = stored key * k_scale; a float, or a float32 tensor of 1 or `[Hkv]`
            elements. Read for a float8 cache only, which stores key / k_scale, saturated (M9). For
            a format with scales in the page, the view of these scales, which is written (M16).
        v_scale: the same for values.
        k_format, v_format: the formats with scales in the page; None for the one of the library
            with these dtypes (`kv_dtype.page_format`).
        rotation: of the heads, before they are stored (P15).

    Raises:
        ContractError: slots that are not int64, fewer keys or values than slots (P4), a scale that
            is not finite and above 0 (M9), or, on a CPU, a slot past the cache.
    """
    check_writable(key_cache=key_cache, value_cache=value_cache)
    check_slots(key, value, slot_mapping)
    check_slot_values(slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    check_scale("k_scale", k_scale)
    check_scale("v_scale", v_scale)
    slots, num_tokens = slot_mapping, slot_mapping.shape[0]
    if num_tokens == 0 or key_cache.shape[0] == 0:
        return
    if rotation is not None:
        key, value = rotation.turn(rotate_heads, key[:num_tokens], value[:num_tokens])
    sides = [(key, key_cache, k_scale, k_format)]
    if not values_are_prefix(key_cache, value_cache):
        sides.append((value, value_cache, v_scale, v_format))
    every_token = slots.device.type == "cpu" and bool((slots >= 0).all())
    for rows, cache, *stored in sides:
        if every_token:
            _write(rows[:num_tokens], slots, cache, *stored)
        else:
            _write_valid(rows, slots, cache, *stored)


def _write_valid(values: Tensor, slots: Tensor, *side: Any) -> None:
    """Write the tokens that have a slot, without a synchronization."""
    valid = slots >= 0
    first_valid = valid.int().argmax()
    tokens = torch.where(valid, torch.arange(slots.numel(), device=slots.device), first_valid)
    targets = slots.index_select(0, tokens).clamp_min(0)
    for stored, target in _stored(values.index_select(0, tokens), *side):
        unchanged = _as_bytes(target)[:1, :1].flatten(0, 1)
        _scatter(torch.where(valid.any(), _as_bytes(stored), unchanged), target, targets)


def _write(values: Tensor, slots: Tensor, *side: Any) -> None:
    for stored, target in _stored(values, *side):
        _scatter(_as_bytes(stored), target, slots)


def _scatter(stored: Tensor, cache: Tensor, slots: Tensor) -> None:
    block_size = cache.shape[1]
    target = _as_bytes(cache)
    target.index_put_((slots // block_size, slots % block_size), stored)


def _stored(
    values: Tensor, cache: Tensor, scale: float | Tensor, known: KVFormat | None
) -> list[tuple[Tensor, Tensor]]:
    """What is stored for `values`, each with the view that receives it."""
    found = page_format(cache, scale, known)
    if found is not None and isinstance(scale, Tensor):
        elements, scales = found.store(values)
        return [(elements, cache), (scales, scale)]
    if is_quantized(cache.dtype):
        return [(quantize(values, scale, cache.dtype), cache)]
    return [(values.to(cache.dtype), cache)]


def _as_bytes(tensor: Tensor) -> Tensor:
    """float8 as uint8, because indexing float8 is not implemented on every device."""
    return tensor.view(torch.uint8) if is_quantized(tensor.dtype) else tensor
