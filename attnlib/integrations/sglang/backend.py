"""The attention backend that SGLang calls."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.sglang.batch import common_metadata, rejections, sequence_lengths
from attnlib.integrations.sglang.graph_buffers import GraphBuffers
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, AttentionType, Window
from attnlib.workspace import BatchLimits

__all__ = ["AttnlibAttentionBackend"]


class AttnlibAttentionBackend(AttentionBackend):
    """attnlib over SGLang's pool of keys and values.

    Each layer of the model gets an attnlib layer at its first call. The metadata of a batch is
    built once for all layers with equal specs.

    Args:
        runner: SGLang's model runner.

    Raises:
        UnsupportedConfigError: the model or the options need something that attnlib does not
            support; with all reasons.
    """

    needs_cpu_seq_lens: bool = True

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if reasons := rejections(runner):
            raise UnsupportedConfigError(
                f"attnlib cannot serve this model under SGLang: {'; '.join(reasons)}; use another "
                "--attention-backend",
                reasons=reasons,
            )
        self._pool = runner.token_to_kv_pool
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._page_size = int(runner.page_size or 1)
        self._context_len = int(runner.model_config.context_len)
        self._dtype = runner.dtype
        self._device = torch.device(runner.device)
        self._layers: dict[int, tuple[Attention, PagedKVCache]] = {}
        self._builders: dict[tuple[AttentionSpec, BatchLimits | None], Any] = {}
        self._graph_limits: BatchLimits | None = None
        self._buffers: GraphBuffers | None = None
        self._common: CommonAttentionMetadata | None = None
        self._host_lengths: torch.Tensor | None = None
        self._capturing = False
        self._batches: dict[AttentionSpec, Any] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take a batch that runs outside of graphs."""
        if forward_batch.forward_mode.is_idle():
            return
        common = common_metadata(forward_batch, self._req_to_token, self._page_size)
        self._begin(common, capturing=False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Take a batch that is captured or replayed. A replay calls no layer, so that metadata
        that a backend computes per batch is refreshed here, in the memory that the graph reads."""
        assert self._buffers is not None  # SGLang calls `init_cuda_graph_state` first
        common = self._buffers.fill(forward_batch, self._req_to_token)
        self._begin(common, capturing=in_capture)
        self._host_lengths = sequence_lengths(forward_batch)
        if not in_capture:
            for (_, limits), builder in self._builders.items():
                if limits is not None:
                    builder.build(0, self._common_of(builder))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read."""
        self._graph_limits = BatchLimits(
            max_num_reqs=max_bs, max_num_tokens=max_num_tokens, max_seq_len=self._context_len
        )
        self._buffers = GraphBuffers(
            max_bs, max_num_tokens, self._context_len, self._page_size, self._device
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of padding rows, whose token is written to SGLang's padding slot."""
        return 1

    def forward_decode(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """See `forward_extend`."""
        return self.forward_extend(*arguments, **keywords)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Attention of one layer over the current batch.

        Args:
            q: `[T, Hq * D]` or `[T, Hq, D]`.
            k, v: `[T, Hkv, D]` and `[T, Hkv, Dv]`, or None where they are in the pool.
            layer: SGLang's layer.
            forward_batch: the batch that the last `init_forward_metadata` took.
            save_kv_cache: whether to write k and v to the pool.
            sinks: `[Hq]`, one sink logit per head.
            unsupported: refused unless None.

        Returns:
            `[T, Hq * Dv]`.
        """
        given = sorted(name for name, value in unsupported.items() if value is not None)
        if given:
            raise UnsupportedConfigError(
                f"attnlib has no implementation of {', '.join(given)}: use another "
                "--attention-backend",
                reasons=[f"{name} is not supported" for name in given],
            )
        attention, cache = self._layer(layer, sinks)
        spec = attention.spec
        batch = self._batches.get(spec)
        if batch is None:
            batch = self._batches[spec] = self._build(attention)
        query = q.view(-1, spec.num_heads, spec.head_size)
        if not save_kv_cache or k is None or v is None:
            k = v = None
        else:
            k = k.view(-1, spec.num_kv_heads, spec.head_size)
            v = v.view(-1, spec.num_kv_heads, spec.head_size_v)
        output: torch.Tensor = attention.forward(query, k, v, cache, batch)
        return output.view(-1, spec.num_heads * spec.head_size_v)

    def _begin(self, common: CommonAttentionMetadata, *, capturing: bool) -> None:
        self._common, self._capturing, self._batches = common, capturing, {}

    def _build(self, attention: Attention) -> Any:
        """The current batch for layers with this spec. Captured batches have builders of their own,
        with buffers of a fixed size."""
        assert self._common is not None  # SGLang announces every batch
        limits = self._graph_limits if self._capturing else None
        key = (attention.spec, limits)
        builder = self._builders.get(key)
        if builder is None:
            builder = attention.backend.make_builder(attention.spec, self._device, limits=limits)
            self._builders[key] = builder
        if self._capturing:
            if self._device.type == "cuda" and not builder.can_run_in_cudagraph(self._common):
                raise UnsupportedConfigError(
                    f"attnlib's backend {attention.backend.get_name()} cannot be captured in a "
                    f"CUDA graph of batches with {self._common.max_query_len} new tokens per "
                    "request: pass --disable-decode-cuda-graph, or select another one with "
                    "ATTNLIB_BACKEND"
                )
            return builder.build_for_cudagraph_capture(self._common_of(builder))
        return builder.build(0, self._common)

    def _common_of(self, builder: Any) -> CommonAttentionMetadata:
        """The current batch of a graph, with host lengths only where the builder needs them: those
        of a captured batch hold for no replay. On a CPU the batch's own tensor serves."""
        assert self._common is not None
        if not builder.needs_host_lengths or self._device.type == "cpu":
            return self._common
        return self._common.replace(seq_lens_cpu=self._host_lengths)

    def _layer(self, layer: Any, sinks: torch.Tensor | None) -> tuple[Attention, PagedKVCache]:
        found = self._layers.get(layer.layer_id)
        if found is None:
            keys, values = self._pool.get_kv_buffer(layer.layer_id)
            spec = self._spec(layer, keys.dtype, sinks is not None)
            attention = Attention(spec, scale=layer.scaling, sinks=sinks, device=self._device)
            pages = (-1, self._page_size)
            scales = {}
            if spec.is_kv_quantized:
                scales = {
                    "k_scale": layer.k_scale_float or 1.0,
                    "v_scale": layer.v_scale_float or 1.0,
                }
            cache = PagedKVCache.from_views(
                keys.view(*pages, *keys.shape[1:]), values.view(*pages, *values.shape[1:]), **scales
            )
            found = self._layers[layer.layer_id] = (attention, cache)
        return found

    def _spec(self, layer: Any, cache_dtype: torch.dtype, has_sink: bool) -> AttentionSpec:
        """The spec of one of SGLang's layers.

        Raises:
            UnsupportedConfigError: cross-attention or an encoder layer.
        """
        if layer.is_cross_attention or layer.attn_type.value != AttentionType.DECODER.value:
            raise UnsupportedConfigError(
                f"layer {layer.layer_id} is cross-attention or an encoder layer "
                f"({layer.attn_type}), which attnlib does not serve under SGLang: use another "
                "--attention-backend"
            )
        window = layer.sliding_window_size
        return AttentionSpec(
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_size=layer.qk_head_dim,
            head_size_v=layer.v_head_dim,
            dtype=self._dtype,
            kv_cache_dtype=cache_dtype,
            block_size=self._page_size,
            # SGLang counts the keys before the query, without its own.
            window=Window(window, 0) if window is not None and window >= 0 else None,
            logits_soft_cap=layer.logit_cap or None,
            has_sink=has_sink,
        )
