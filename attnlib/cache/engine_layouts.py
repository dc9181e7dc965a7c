"""Caches that other engines allocate, as the two views of a `PagedKVCache`. Nothing is copied.

Sources of the shapes: `get_kv_cache_shape` of vLLM's backends, `MHATokenToKVPool` of SGLang,
`BatchDecodeWithPagedKVCacheWrapper` of FlashInfer, `KVCacheManager.get_buffers` of TensorRT-LLM and
`PagedAttentionCache` of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnlib.cache.engine_tensors import by_token, check_shape, keys_and_values, not_paged, typed
from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EngineLayouts"]

_Scale = float | torch.Tensor


class EngineLayouts:
    """Named constructors of `PagedKVCache`, one per engine.

    Every cache is a set of views: the engine's memory is read and written in place. A cache of
    bytes (`torch.uint8`) that holds 8-bit floats needs `dtype`. `k_scale` and `v_scale` are the
    scales of a quantized cache.
    """

    if TYPE_CHECKING:

        @classmethod
        def from_views(
            cls,
            key_cache: torch.Tensor,
            value_cache: torch.Tensor,
            *,
            k_scale: _Scale = 1.0,
            v_scale: _Scale = 1.0,
        ) -> Self: ...

    @classmethod
    def from_vllm(
        cls,
        kv_cache: torch.Tensor,
        *,
        kv_dim: int | None = None,
        head_size: int | None = None,
        dtype: torch.dtype | None = None,
        k_scale: _Scale = 1.0,
        v_scale: _Scale = 1.0,
    ) -> Self:
        """The cache of one layer in vLLM.

        Args:
            kv_cache: up to vLLM 0.24 `[2, B, N, Hkv, D]` or `[B, 2, N, Hkv, D]`; from 0.26 packed
                `[B, Hkv, N, D + Dv]`. Any order in memory (NHD or HND).
            kv_dim: the dimension of K and V of a 5-D cache, 0 or 1; None finds it by its size,
                which is ambiguous for a cache of 2 blocks.
            head_size: D of a packed cache; None means half of the last dimension.
            dtype: dtype of the elements; None means that of `kv_cache`.
            k_scale, v_scale: scales of a quantized cache.

        Raises:
            ContractError: another shape, or an ambiguous one.
        """
        kv = typed("kv_cache", kv_cache, dtype)
        if kv.dim() == 4:
            size = kv.shape[3] // 2 if head_size is None else head_size
            if (head_size is None and kv.shape[3] % 2) or not 0 < size < kv.shape[3]:
                raise ContractError(
                    f"kv_cache {tuple(kv.shape)} packs keys and values in its last dimension, "
                    f"which cannot be split at head_size={head_size}: pass that of the keys",
                    rule="P1",
                )
            by_token = kv.transpose(1, 2)
            key, value = by_token[..., :size], by_token[..., size:]
        else:
            check_shape("kv_cache", kv, 5, "[2, B, N, Hkv, D], [B, 2, N, Hkv, D] or packed 4-D")
            found = [dim for dim in (0, 1) if kv.shape[dim] == 2 and kv_dim in (None, dim)]
            if len(found) != 1:
                problem = "are both 2" if found else f"are not 2 (kv_dim={kv_dim})"
                raise ContractError(
                    f"dimensions 0 and 1 of kv_cache {tuple(kv.shape)} {problem}: one of them "
                    "holds keys and values; pass kv_dim=0 or kv_dim=1",
                    rule="P1",
                )
            key, value = kv.unbind(found[0])
        return cls.from_views(key, value, k_scale=k_scale, v_scale=v_scale)

    @classmethod
    def from_sglang(
        cls,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        page_size: int,
        *,
        dtype: torch.dtype | None = None,
        k_scale: _Scale = 1.0,
        v_scale: _Scale = 1.0,
    ) -> Self:
        """The cache of one layer in SGLang. Slots are those of its token pool (`out_cache_loc`),
        and the block table is `req_to_token[request, ::page_size] // page_size`.

        Args:
            k_buffer: `[slots + page_size, Hkv, D]`, `token_to_kv_pool.k_buffer[layer]`.
            v_buffer: `[slots + page_size, Hkv, Dv]`, likewise.
            page_size: N, tokens per page; rows past the last whole page are left out.
            dtype: dtype of the elements; None means that of the buffers.
            k_scale, v_scale: scales of a quantized cache.

        Raises:
            ContractError: another shape, or fewer rows than one page.
        """
        views = []
        page_size = as_count("page_size", page_size, 1)
        for name, buffer in (("k_buffer", k_buffer), ("v_buffer", v_buffer)):
            check_shape(name, buffer, 3, "[slots, Hkv, D]")
            if page_size > buffer.shape[0]:
                raise ContractError(
                    f"page_size={page_size} must be from 1 to the {buffer.shape[0]} rows of {name}",
                    rule="P1",
                )
            tokens = typed(name, buffer, dtype)
            pages = buffer.shape[0] // page_size
            views.append(tokens[: pages * page_size].view(pages, page_size, *buffer.shape[1:]))
        return cls.from_views(views[0], views[1], k_scale=k_scale, v_scale=v_scale)

    @classmethod
    def from_flashinfer(
        cls,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_layout: str = "NHD",
        *,
        dtype: torch.dtype | None = None,
        k_scale: _Scale = 1.0,
        v_scale: _Scale = 1.0,
    ) -> Self:
        """The paged cache of one layer as FlashInfer's wrappers take it.

        Args:
            paged_kv_cache: `[B, 2, N, Hkv, D]` (NHD) or `[B, 2, Hkv, N, D]` (HND), or a pair of
                keys and values without the dimension of 2.
            kv_layout: "NHD" or "HND".
            dtype: dtype of the elements; None means that of the cache.
            k_scale, v_scale: scales of a quantized cache.

        Raises:
            ContractError: another shape or layout.
        """
        if isinstance(paged_kv_cache, torch.Tensor):
            key, value = keys_and_values("paged_kv_cache", paged_kv_cache)
        else:
            if not isinstance(paged_kv_cache, list | tuple) or len(paged_kv_cache) != 2:
                raise ContractError(
                    f"paged_kv_cache is a {type(paged_kv_cache).__name__}; it must be one tensor, "
                    "or a pair of keys and values",
                    rule="P1",
                )
            key, value = paged_kv_cache
            for name, view in (("paged_k_cache", key), ("paged_v_cache", value)):
                check_shape(name, view, 4, "[B, N, Hkv, D] or [B, Hkv, N, D]")
        key, value = (
            by_token(typed("paged_kv_cache", view, dtype), kv_layout) for view in (key, value)
        )
        return cls.from_views(key, value, k_scale=k_scale, v_scale=v_scale)

    @classmethod
    def from_tensorrt_llm(
        cls,
        buffer: torch.Tensor,
        kv_layout: str,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        dtype: torch.dtype | None = None,
        k_scale: _Scale = 1.0,
        v_scale: _Scale = 1.0,
    ) -> Self:
        """The cache of one layer in TensorRT-LLM.

        Args:
            buffer: `kv_cache_manager.get_buffers(layer, kv_layout)`: `[B, 2, N, Hkv, D]` (NHD) or
                `[B, 2, Hkv, N, D]` (HND); or the pool of the layer, `[B, 2, N * Hkv * D]`, which is
                `[:, layer]` of the primary pool of all layers.
            kv_layout: "NHD" or "HND", the layout that the engine's attention kernels write.
            num_kv_heads, head_size: Hkv and D, required for a pool without these dimensions.
            dtype: dtype of the elements; None means that of `buffer`.
            k_scale, v_scale: scales of a quantized cache.

        Raises:
            ContractError: another shape or layout.
        """
        pool = typed("buffer", buffer, dtype)
        if pool.dim() == 3:
            per_token = (num_kv_heads or 0) * (head_size or 0)
            if per_token < 1 or pool.shape[2] % per_token:
                raise ContractError(
                    f"buffer {tuple(pool.shape)} has {pool.shape[2]} elements per page, not a "
                    f"multiple of num_kv_heads={num_kv_heads} times head_size={head_size}: "
                    "pass both",
                    rule="P1",
                )
            tokens, heads, size = pool.shape[2] // per_token, num_kv_heads or 0, head_size or 0
            inner = (tokens, heads, size) if kv_layout == "NHD" else (heads, tokens, size)
            pool = pool.view(*pool.shape[:2], *inner)
        key, value = (by_token(view, kv_layout) for view in keys_and_values("buffer", pool))
        return cls.from_views(key, value, k_scale=k_scale, v_scale=v_scale)

    @classmethod
    def from_transformers(cls, paged_cache: Any, layer_idx: int) -> Self:
        """The cache of one full-attention layer in transformers' continuous batching. Its read and
        write indices are slots of the result.

        Args:
            paged_cache: a `PagedAttentionCache` of transformers 5.17 or later.
            layer_idx: the index of the layer.

        Raises:
            ContractError: a layer that is not cached, or a sliding layer, whose ring buffer no
                block table describes.
        """
        if hasattr(paged_cache, "layer_to_allocator"):  # from 5.18: one tensor for all layers
            allocator = paged_cache.layer_to_allocator.get(layer_idx)
            if allocator is None or not allocator.supports_block_table:
                raise ContractError(not_paged(layer_idx, allocator is None))
            views = allocator.get_cache_for_block_table
            layers = paged_cache.layer_to_allocator
            # Views of later layers begin later and have fewer blocks. Tables of all layers are
            # equal, so none has a block that the last layer lacks; equal views share plans.
            blocks = min(len(views(index)[0]) for index in layers if layers[index] is allocator)
            return cls.from_views(*(view[:blocks] for view in views(layer_idx)))
        group_and_index = paged_cache.layer_index_to_group_indices.get(layer_idx)
        if group_and_index is None or paged_cache.sliding_windows[layer_idx] != 1:  # 1: no window
            raise ContractError(not_paged(layer_idx, group_and_index is None))
        index = group_and_index[1]
        buffers = paged_cache.key_cache[index], paged_cache.value_cache[index]
        return cls.from_sglang(*buffers, paged_cache.block_size)
