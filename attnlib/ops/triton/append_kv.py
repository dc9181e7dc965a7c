"""Append new keys and values to the cached ones of each request, in one launch."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.kernels.append_kv import append_kv_kernel
from attnlib.ops.triton.launch.bound import (
    ALIGNMENT,
    CHANGES,
    BoundLaunch,
    Submit,
    current_stream,
    launches_observed,
)
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["BoundAppend", "append_kv", "bind_append"]

_ELEMENTS_PER_PROGRAM = 2048


def append_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    seq_lens: Tensor,
) -> None:
    """Write `key[r, i]` and `value[r, i]` to position `cache_seqlens[r] + i` of request r.

    Args:
        key: `[R, T, Hkv, D]`, last stride 1, T new tokens of each request.
        value: `[R, T, Hkv, Dv]`, likewise.
        key_cache: `[B, N, Hkv, D]`, last stride 1, not quantized.
        value_cache: `[B, N, Hkv, Dv]`, likewise.
        block_table: `[R, M]` int32, last stride 1 (P3). Positions at or past `M * N` are not
            written.
        cache_seqlens: `[R]` int32, contiguous; cached tokens, without the new ones.
        seq_lens: `[R]` int32, contiguous, written: `cache_seqlens + T`. Must not be
            `cache_seqlens`.
    """
    append = bind_append(key, value, key_cache, value_cache, block_table, cache_seqlens, seq_lens)
    append.run(key, value, key_cache, value_cache)


def bind_append(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    seq_lens: Tensor,
) -> BoundAppend:
    """`append_kv` of tensors with the signatures of these, over this block table and these lengths,
    whose values may change between calls."""
    signature = tuple(map(tensor_signature, (key, value, key_cache, value_cache, block_table)))
    name = ("append", key.get_device(), *signature, cache_seqlens.dtype, seq_lens.dtype)
    launch = LAUNCHES.get(name) or LAUNCHES.keep(name, _launch(key, key_cache, value_cache))
    numbers = (
        key.shape[2], key.shape[1], block_table.shape[1], block_table.stride(0),
        *key.stride()[:3], *value.stride()[:3], *key_cache.stride()[:3], *value_cache.stride()[:3],
    )  # fmt: skip
    batch = (cache_seqlens, block_table, seq_lens)
    return BoundAppend(launch, numbers, batch)


class BoundAppend:
    """The launch of `append_kv` over one block table and one tensor of lengths."""

    def __init__(
        self, launch: BoundLaunch, numbers: tuple[int, ...], batch: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self._launch = launch
        self._numbers = numbers
        self._batch = batch
        self._index = batch[0].get_device()
        self._direct: Submit | None = None
        self._bind()

    @property
    def is_direct(self) -> bool:
        """Whether `submit` is possible; False until the first launch by Triton."""
        return self._direct is not None

    def submit(
        self, stream: int, key: int, value: int, key_cache: int, value_cache: int, *scales: Any
    ) -> None:
        """Launch on addresses, like a bound `write_kv`; the scales of plain caches are not read."""
        assert self._direct is not None  # the caller has checked `is_direct`
        self._direct(stream, key, value, key_cache, value_cache)

    def _bind(self) -> None:
        if self._launch.is_direct:
            addresses = tuple(tensor.data_ptr() for tensor in self._batch)
            arguments = (*(CHANGES,) * 4, *addresses, *self._numbers)
            self._direct = self._launch.bind(True, True, arguments)

    def run(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """Launch on the current stream."""
        k, v, kc, vc = (
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
        )
        aligned = not (k | v | kc | vc) & ALIGNMENT
        direct = self._direct
        if direct is None or not aligned or launches_observed():
            with chips.device_guard(key):
                arguments = (key, value, key_cache, value_cache, *self._batch, *self._numbers)
                self._launch.by_triton(arguments, aligned)
            self._bind()
        elif chips.current_device() == self._index:
            direct(current_stream(self._index), k, v, kc, vc)
        else:
            with chips.device_guard(key):
                direct(current_stream(self._index), k, v, kc, vc)


def _launch(key: Tensor, key_cache: Tensor, value_cache: Tensor) -> BoundLaunch:
    num_reqs, new_tokens, num_heads, head_size = key.shape
    head_size_v = value_cache.shape[3]
    padded, padded_v = triton.next_power_of_2(head_size), triton.next_power_of_2(head_size_v)
    block_h = max(1, _ELEMENTS_PER_PROGRAM // max(padded, padded_v))
    block_h = min(triton.next_power_of_2(num_heads), block_h)
    constants: dict[str, Any] = {
        "BLOCK_SIZE": key_cache.shape[1],
        "D": head_size,
        "DV": head_size_v,
        "D_PAD": padded,
        "DV_PAD": padded_v,
        "BLOCK_H": block_h,
        "num_warps": 4 if padded * block_h > 512 else 1,
        "enable_fp_fusion": True,
    }
    grid = (num_reqs * new_tokens, triton.cdiv(num_heads, block_h), 1)
    return BoundLaunch(append_kv_kernel, grid, constants)
