"""Append new keys and values to the cached ones of each request, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from attnlib.ops.checks import vector_elements
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.kernels.append_kv import append_kv_kernel
from attnlib.ops.triton.kernels.cache_write import WriteConfig
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.sequence import (
    KEY,
    KEY_CACHE,
    LSE,
    OUT,
    QUERY,
    VALUE,
    VALUE_CACHE,
    Launches,
    Part,
    bind_step,
    prepare_sequence,
)

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
    launch = LAUNCHES.get(name) or LAUNCHES.keep(name, _launch(key, value, key_cache, value_cache))
    numbers = (
        key.shape[2],
        key.shape[1],
        block_table.shape[1],
        block_table.stride(0),
        *key.stride()[:3],
        *value.stride()[:3],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
    )
    batch = (cache_seqlens, block_table, seq_lens)
    return BoundAppend(launch, numbers, batch)


class BoundAppend:
    """The launch of `append_kv` over one block table and one tensor of lengths.

    Attributes:
        batch: lengths before the call, block table, and the lengths that the call writes.
    """

    def __init__(
        self, launch: BoundLaunch, numbers: tuple[int, ...], batch: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self._launch = launch
        self._numbers = numbers
        self.batch = batch
        self._submit: Callable[..., bool] | None = None

    @property
    def is_direct(self) -> bool:
        """Whether `bind` is possible; False until the first launch by Triton."""
        return self._launch.is_direct

    def bind(self) -> Launches:
        """The direct launch, for a step plan. It holds the addresses of `batch`."""
        tensors = (KEY, VALUE, KEY_CACHE, VALUE_CACHE)
        addresses = tuple(tensor.data_ptr() for tensor in self.batch)
        arguments = (*tensors, *addresses, *self._numbers)
        return Launches((bind_step(self._launch, True, True, arguments),))

    def run(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """Launch on the current stream."""
        if self._submit is None and self.is_direct:
            index, unused = self.batch[0].get_device(), dict.fromkeys((QUERY, OUT, LSE))
            template = prepare_sequence([Part(self.bind())], index, VALUE + 1, unused)
            self._submit = template.bind(())
        if self._submit is not None and self._submit(key_cache, value_cache, key, value):
            return
        tensors = (key, value, key_cache, value_cache)
        aligned = not any(tensor.data_ptr() & ALIGNMENT for tensor in tensors)
        with chips.device_guard(key):
            self._launch.by_triton((*tensors, *self.batch, *self._numbers), aligned)


def _launch(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> BoundLaunch:
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
        "VEC_K": vector_elements("key", key),
        "VEC_V": vector_elements("value", value),
        "VEC_KC": vector_elements("key_cache", key_cache),
        "VEC_VC": vector_elements("value_cache", value_cache),
        "ONE_TOKEN": new_tokens == 1,
        "num_warps": 4 if padded * block_h > 512 else 1,
        "enable_fp_fusion": True,
        **chips.programmatic_launch(chips.limits_of(key)),
    }
    grid = (num_reqs * new_tokens, triton.cdiv(num_heads, block_h), 1)
    return BoundLaunch(append_kv_kernel, grid, with_config(constants, WriteConfig))
