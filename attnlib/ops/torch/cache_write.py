"""Put this step's keys and values into their slots (P4, P7).

Skipping a token on a GPU without asking how many there are takes a trick: boolean indexing would wait for the device,
and writing old content back races with a token that owns the slot. Here a skipped token repeats what the first token
with a slot writes: the same value to the same slot, so the order of the writes does not matter and no other slot is
touched. When no token of the call has a slot, the first slot of the cache is rewritten with its own bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.torch.quant import is_quantised, quantise

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
) -> None:
    """Write `key[t]` and `value[t]` to slot `slot_mapping[t]` of the cache, for each t whose slot is not negative.

    Args:
        key: `[T', Hkv, D]`, T' >= T; tokens past T are not written.
        value: `[T', Hkv, Dv]`.
        key_cache: `[B, N, Hkv, D]`, any strides; may share memory with `value_cache`.
        value_cache: `[B, N, Hkv, Dv]`, any strides.
        slot_mapping: `[T]` int64, block * N + offset; negative writes nothing. Of two tokens with one slot, one stays.
        k_scale, v_scale: float, 0-d tensor or `[Hkv]` float32; a quantised cache stores value / scale, saturated (M9).

    Raises:
        ContractError: fewer keys or values than slots (P4).
    """
    num_tokens = slot_mapping.numel()
    for name, rows in (("key", key), ("value", value)):
        if rows.shape[0] < num_tokens:
            raise ContractError(
                f"{name} has {rows.shape[0]} tokens and slot_mapping {num_tokens}: "
                "pass one row per slot, or a shorter slot_mapping",
                rule="P4",
            )
    if num_tokens == 0 or key_cache.shape[0] == 0:
        return
    slots = slot_mapping.flatten().long()
    if slots.device.type == "cpu":
        tokens = torch.nonzero(slots >= 0).flatten()
        if tokens.numel() == num_tokens:
            _put(key[:num_tokens], key_cache, slots, k_scale)
            _put(value[:num_tokens], value_cache, slots, v_scale)
        elif tokens.numel() > 0:
            _put(key[tokens], key_cache, slots[tokens], k_scale)
            _put(value[tokens], value_cache, slots[tokens], v_scale)
        return
    _put_without_sync(key, key_cache, slots, k_scale)
    _put_without_sync(value, value_cache, slots, v_scale)


def _put_without_sync(values: Tensor, cache: Tensor, slots: Tensor, scale: float | Tensor) -> None:
    valid = slots >= 0
    donor = valid.int().argmax()
    tokens = torch.where(valid, torch.arange(slots.numel(), device=slots.device), donor)
    stored = _stored(values.index_select(0, tokens), cache, scale)
    unchanged = _as_bytes(cache)[:1, :1].flatten(0, 1)
    stored = torch.where(valid.any(), _as_bytes(stored), unchanged)
    _scatter(stored, cache, slots.index_select(0, tokens).clamp_min(0))


def _put(values: Tensor, cache: Tensor, slots: Tensor, scale: float | Tensor) -> None:
    _scatter(_as_bytes(_stored(values, cache, scale)), cache, slots)


def _scatter(stored: Tensor, cache: Tensor, slots: Tensor) -> None:
    block_size = cache.shape[1]
    target = _as_bytes(cache)
    target.index_put_((slots // block_size, slots % block_size), stored)


def _stored(values: Tensor, cache: Tensor, scale: float | Tensor) -> Tensor:
    return (
        quantise(values, scale, cache.dtype)
        if is_quantised(cache.dtype)
        else values.to(cache.dtype)
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    """One-byte floats as integers, which every device can index and select."""
    return tensor.view(torch.uint8) if is_quantised(tensor.dtype) else tensor
