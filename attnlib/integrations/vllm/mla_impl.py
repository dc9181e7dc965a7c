"""The attention of one vLLM layer over latents (MLA)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    get_and_maybe_dequant_weights,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MLAAttentionImpl

from attnlib.cache.storage import PagedKVCache
from attnlib.integrations.vllm.context_parallel import divided_layer, refuse_prefill_groups
from attnlib.integrations.vllm.layer_spec import refuse_arguments
from attnlib.integrations.vllm.mla_builder import AttnlibMLAMetadataBuilder, VllmLatentMetadata
from attnlib.integrations.vllm.warm import GroupWarmup, register_kernels, run_batches
from attnlib.layer import Attention
from attnlib.mla.latent_attention import LatentAttention
from attnlib.mla.warmup import warm_up_expanded
from attnlib.parallel import ParallelAttention, warmup_parallel
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import AttentionSpec

__all__ = ["AttnlibMLAImpl"]


class AttnlibMLAImpl(MLAAttentionImpl[Any]):
    """One latent layer. vLLM projects the queries and outputs of decodes (`forward_mqa`); prefills
    (`forward_mha`) run in the form that costs less, by `LatentAttention`.

    Args:
        num_heads: query heads of this rank.
        head_size: elements of a latent with its rotary part.
        scale: softmax scale.
        num_kv_heads: 1.
        kv_cache_dtype: as the user names it.
        kv_lora_rank, qk_nope_head_dim, v_head_dim: elements of a latent, of the part of a key
            without rotary embedding, and of a value.
        kv_b_proj: computes keys and values of the heads from latents.
        attn_type, q_lora_rank, qk_rope_head_dim, qk_head_dim: not read.
        key_selection: of a layer over selected keys.
        unsupported: arguments for which attnlib has no implementation; refused unless None.

    Raises:
        UnsupportedConfigError: no backend of attnlib, or not the one that ATTNLIB_BACKEND names,
            supports the layer; with all reasons.
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *,
        kv_cache_dtype: str,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        attn_type: str = "decoder",
        q_lora_rank: int | None = None,
        qk_rope_head_dim: int | None = None,
        qk_head_dim: int | None = None,
        key_selection: KeySelection | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_arguments("latent attention", unsupported)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank, self.kv_b_proj = kv_lora_rank, kv_b_proj
        self._sizes = qk_nope_head_dim, v_head_dim
        self._device = torch.device(current_platform.device_type)
        spec = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=1,
            head_size=head_size,
            head_size_v=kv_lora_rank,
            dtype=torch.get_default_dtype(),
            kv_cache_dtype=kv_cache_dtype,
            block_size=get_current_vllm_config().cache_config.block_size or 16,
            use_mla=True,
            key_selection=key_selection,
        )
        arguments: dict[str, Any] = {"scale": self.scale, "device": self._device}
        self.divided: ParallelAttention | None = None
        if self.dcp_world_size > 1:
            refuse_prefill_groups()
            self.divided = divided_layer(spec, **arguments)
        self._attention = Attention(spec, **arguments)
        self._prefills: LatentAttention | None = None
        self._memory: tuple[int, torch.Size] | None = None
        self._cache: PagedKVCache | None = None
        self.group_warmup: GroupWarmup | None = None  # set by the builder of the layer's group
        register_kernels(self._device)

    @property
    def spec(self) -> AttentionSpec:
        """What the layer needs."""
        return self._attention.spec

    def set_block_size(self, block_size: int) -> None:
        """Take the block size, which vLLM decides after the layers exist.

        Raises:
            UnsupportedConfigError: attnlib's backend does not support it.
        """
        if self.spec.block_size != block_size:
            self._attention.set_block_size(block_size)
            if self.divided is not None:
                self.divided.set_block_size(block_size)

    def warmup_key(self, layer: Any) -> Hashable:
        """Equal for layers of a group with the same kernels."""
        return self.spec, layer.kv_cache.shape[1:], layer.kv_cache.stride()

    def warm_up(self, layer: Any, builder: AttnlibMLAMetadataBuilder, shared: bool) -> None:
        """See `AttnlibImpl.warm_up`."""
        cache, limits = self._view(layer.kv_cache, layer._k_scale), builder.limits
        columns = builder.block_table_width
        decodes, prefills = (builder.decodes, builder.prefills) if shared else (None, None)
        if self.divided is not None:
            if self.divided.cached.backend.get_name() != "torch":
                warmup_parallel(self.divided, cache, limits, builder=decodes, max_blocks=columns)
            return
        run_batches(self._attention, cache, limits, decodes, columns, self._device)
        self._prefills = self._prefills or self._prefill_layer()
        warm_up_expanded(self._prefills, cache, limits, prefills)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *args: Any,
    ) -> None:
        """Write the new latents: by vLLM's operation, which writes both parts in one launch, and by
        attnlib's where vLLM has none (on a CPU)."""
        if kv_cache.numel() == 0 or hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *args
            )
            return
        slots = slot_mapping.flatten()
        rows = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1)[: slots.numel(), None]
        cache = self._view(kv_cache, k_scale)
        self._attention.impl.write_kv(rows, rows[..., : self.kv_lora_rank], cache, slots)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: VllmLatentMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The decode part.

        Args:
            q: `[T, Hq, D]` in the space of the latents, or its latent and rotary parts.
            kv_c_and_k_pe_cache: `[B, N, D]`, vLLM's memory of this layer.
            attn_metadata: the batch.
            layer: vLLM's layer, for the scale of its cache.

        Returns:
            `[T, Hq, kv_lora_rank]`, and None instead of the LSE; with decode context parallelism
            of the heads of all ranks over this rank's latents, and the LSE.
        """
        self._warm_up_pending()
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        cache = self._view(kv_c_and_k_pe_cache, layer._k_scale)
        if self.divided is not None:
            return self.divided.attend_cached(query, cache, attn_metadata.decode)
        return self._attention(query, None, None, cache, attn_metadata.decode), None

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: VllmLatentMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """The prefill part.

        Args:
            q: `[T, Hq, P + rotary part]`, as it is before absorption.
            kv_c_normed, k_pe: `[T, kv_lora_rank]` and `[T, 1, rotary part]`, the new latents.
            kv_c_and_k_pe_cache: `[B, N, D]`, vLLM's memory of this layer.
            attn_metadata: the batch.
            k_scale: scale of a float8 cache.
            output: `[T, Hq * V]`, written.
            output_scale: not supported; vLLM passes it only to backends that announce it.
        """
        assert output_scale is None
        self._warm_up_pending()
        self._prefills = self._prefills or self._prefill_layer()
        cache = self._view(kv_c_and_k_pe_cache, k_scale)
        latents = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1)
        out = output.view(q.shape[0], self.num_heads, self._sizes[1])
        if self.divided is None:
            self._prefills(q, latents, cache, attn_metadata.prefill, output=out)
        else:
            keys = latents[:, None], latents[:, None, : self.kv_lora_rank]
            absorbed = self._prefills.absorb(q)
            attended = self.divided(absorbed, *keys, cache, attn_metadata.prefill)
            self._prefills.project(attended, out)

    def _warm_up_pending(self) -> None:
        if self.group_warmup is not None and self.group_warmup.pending:
            self.group_warmup.run(between_batches=False)

    def _prefill_layer(self) -> LatentAttention:
        """The layer over queries before absorption. Its weights are those of `kv_b_proj`, without a
        copy unless they are quantized."""
        key_size, value_size = self._sizes
        weights = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=self.spec.dtype)
        projection = weights.view(self.num_heads, key_size + value_size, self.kv_lora_rank)
        return LatentAttention(
            self.spec, projection, key_size, scale=self.scale, device=self._device
        )

    def _view(self, kv_cache: torch.Tensor, k_scale: torch.Tensor) -> PagedKVCache:
        """vLLM's memory of this layer as a cache of latents."""
        key = kv_cache.data_ptr(), kv_cache.shape
        if self._cache is None or key != self._memory:
            if kv_cache.dtype.itemsize == 1:
                latents = kv_cache.view(self.spec.kv_dtype)[:, :, None]
                scales = {"k_scale": k_scale, "v_scale": k_scale}
            else:
                latents, scales = kv_cache[:, :, None], {}
            values = latents[..., : self.kv_lora_rank]
            self._cache = PagedKVCache.from_views(latents, values, **scales)
            self._memory = key
            self.set_block_size(self._cache.block_size)
        return self._cache
