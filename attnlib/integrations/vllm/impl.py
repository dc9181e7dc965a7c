"""The attention of one vLLM layer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.context_parallel import ContextParallelAttention
from attnlib.integrations.vllm.kv_cache import cache_view
from attnlib.integrations.vllm.layer_spec import refuse_arguments, spec_of_layer
from attnlib.integrations.vllm.masks import Mask, masked_spec
from attnlib.integrations.vllm.metadata import VllmMetadata
from attnlib.integrations.vllm.warm import GroupWarmup, register_kernels, run_batches
from attnlib.layer import Attention
from attnlib.score_functions.builtin import alibi_sqrt
from attnlib.spec import AttentionSpec, AttentionType

__all__ = ["AttnlibImpl"]


class AttnlibImpl(AttentionImpl):
    """One attention layer, computed by attnlib's `Attention`.

    Args:
        num_heads, num_kv_heads, head_size, scale, kv_cache_dtype: of this rank's layer.
        alibi_slopes: one per query head.
        sliding_window: visible keys, including the query's own.
        logits_soft_cap: None or 0 for none.
        attn_type: see `ATTENTION_TYPES`.
        kv_sharing_target_layer_name: the layer whose cache this one reads.
        sinks: `[num_heads]`, one sink logit per query head.
        use_alibi_sqrt: the bias grows with the root of the distance.
        unsupported: arguments for which attnlib has no implementation; refused unless None.

    Raises:
        UnsupportedConfigError: no backend of attnlib, or not the one that ATTNLIB_BACKEND names,
            supports the layer; with all reasons.
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        **unsupported: Any,
    ) -> None:
        refuse_arguments("attention", unsupported)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        spec = spec_of_layer(
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=head_size,
            kv_cache_dtype=kv_cache_dtype,
            attn_type=AttentionType(attn_type),
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap or None,
            has_alibi=alibi_slopes is not None and not use_alibi_sqrt,
            score_function=alibi_sqrt() if use_alibi_sqrt else None,
            has_sink=sinks is not None,
            kv_sharing=kv_sharing_target_layer_name is not None,
        )
        device = torch.device(current_platform.device_type)
        self._distributed: ContextParallelAttention | None = None
        if self.dcp_world_size > 1:
            slopes = alibi_slopes if spec.has_alibi else None
            self._distributed = ContextParallelAttention(spec, self.scale, slopes, sinks, device)
            spec = spec.replace(needs_lse=True)
        score = {}
        if use_alibi_sqrt:
            score["slope"] = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        self._arguments: dict[str, Any] = {
            "scale": self.scale,
            "alibi_slopes": None if use_alibi_sqrt else alibi_slopes,
            "sinks": sinks,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "device": device,
        }
        self._attention = Attention(spec, score_tensors=score or None, **self._arguments)
        self._masked: dict[Mask, Attention] = {Mask.OWN: self._attention}
        self._device = device
        self._kv_cache: torch.Tensor | None = None
        self._cache: PagedKVCache | None = None
        self.group_warmup: GroupWarmup | None = None  # set by the builder of the layer's group
        register_kernels(device)

    @property
    def spec(self) -> AttentionSpec:
        """What the layer needs."""
        return self._attention.spec

    @property
    def distributed(self) -> ContextParallelAttention | None:
        """The layer over a cache that is distributed over the ranks of a group."""
        return self._distributed

    def use_mask(self, mask: Mask, *, clamped: bool, retained: int) -> AttentionSpec:
        """Make the attention under a mask, if there is none yet; its spec. Arguments as in
        `masked_spec`."""
        if mask not in self._masked:
            spec = masked_spec(self.spec, mask, clamped=clamped, retained=retained)
            same = spec == self.spec
            arguments = self._arguments
            self._masked[mask] = self._attention if same else Attention(spec, **arguments)
        return self._masked[mask].spec

    def set_block_size(self, block_size: int) -> None:
        """Take the block size, which vLLM decides after the layers exist.

        Raises:
            UnsupportedConfigError: attnlib's backend does not support it.
        """
        if self.spec.block_size != block_size:
            self._attention.set_block_size(block_size)
            if self._distributed is not None:
                self._distributed.set_block_size(block_size)

    def warmup_key(self, layer: Any) -> Hashable:
        """Equal for layers of a group with the same kernels."""
        memory = layer.kv_cache
        specs = tuple(attention.spec for attention in self._masked.values())
        return specs, memory.shape[1:], memory.stride(), memory.dtype

    def warm_up(self, layer: Any, builder: Any, shared: bool) -> None:
        """Compile the kernels of this layer.

        Args:
            layer: vLLM's layer.
            builder: of its group.
            shared: whether it may build the batches.
        """
        self._bind(layer, layer.kv_cache)
        limits, columns = builder.limits, builder.block_table_width
        if self._distributed is not None:
            spec = self._distributed.spec
            own = builder.distributed.builders[spec] if shared else None
            self._distributed.warm_up(self._cache, own, limits, columns)
            return
        caches = self._caches_like_this(layer, builder.take_layers()) if self.spec.is_paged else []
        for attention in dict.fromkeys(self._masked.values()):
            own = builder.builders[attention.spec] if shared else None
            run_batches(attention, self._cache, limits, own, columns, self._device, caches)

    def _caches_like_this(self, layer: Any, layers: list[Any]) -> list[PagedKVCache]:
        """The caches of the other layers that need the same kernels."""
        key, found = self.warmup_key(layer), []
        for other in layers:
            if other is not layer and (impl := other.impl).warmup_key(other) == key:
                impl._bind(other, other.kv_cache)
                found.append(impl._cache)
        return found

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the new keys and values. vLLM calls it before `forward`, except in profiling runs
        and for layers that read the cache of another one.

        Args:
            layer, kv_cache: as in `forward`.
            key, value: `[T, Hkv, D]`; may have more rows than there are slots.
            slot_mapping: where to write each row; -1 for nowhere.
        """
        if not self.spec.is_paged or not kv_cache.numel():
            return
        if kv_cache is not self._kv_cache:
            self._bind(layer, kv_cache)
        assert self._cache is not None
        self._attention.impl.write_kv(key, value, self._cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: VllmMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to keys and values that `do_kv_cache_update` has written.

        Args:
            layer: vLLM's layer, for the scales of its cache.
            query: `[T, Hq, D]`; T may exceed the tokens of the batch (padding).
            key, value: `[T, Hkv, D]`, read by encoders and with decode context parallelism.
            kv_cache: vLLM's memory of this layer.
            attn_metadata: the batch; None in a profiling run, whose output is 0.
            output: `[T, Hq, D]`, written in place.
            output_scale, output_block_scale: not supported; vLLM passes them only to backends that
                announce a quantized output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedConfigError(
                "attnlib writes unquantized output: disable the fusion of attention and "
                "quantization (fuse_attn_quant)"
            )
        if self.group_warmup is not None and self.group_warmup.pending:
            self.group_warmup.run(between_batches=attn_metadata is None)
        if attn_metadata is None:
            return output.fill_(0)
        if kv_cache is not self._kv_cache:
            self._bind(layer, kv_cache)
        if self._distributed is not None:
            self._distributed.forward(query, key, value, self._cache, attn_metadata, output)
            return output
        attention = self._masked[attn_metadata.mask_of_layer]
        batch = attn_metadata.batches[attention.spec]
        if self.spec.is_paged:
            key = value = None
        attention(query, key, value, self._cache, batch, output=output)
        return output

    def _bind(self, layer: Any, kv_cache: torch.Tensor) -> None:
        """Take vLLM's memory of this layer."""
        if self.spec.is_paged:
            self._cache = cache_view(layer, kv_cache, self.spec)
            self.set_block_size(self._cache.block_size)
        self._kv_cache = kv_cache
