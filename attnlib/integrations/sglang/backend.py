"""The attention backend that SGLang calls."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.sglang.batch import (
    common_metadata,
    rejections,
    sequence_lengths,
    verifies_trees,
)
from attnlib.integrations.sglang.graph_buffers import GraphBuffers
from attnlib.integrations.sglang.layers import Layers, check_keys
from attnlib.integrations.sglang.trees import TreeMasks, tree_bias
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, MaskKind
from attnlib.workspace import BatchLimits

__all__ = ["AttnlibAttentionBackend"]


class AttnlibAttentionBackend(AttentionBackend):
    """attnlib over SGLang's pool of keys and values.

    Each layer of the model gets an attnlib layer at its first call. The metadata of a batch is
    built once for all layers with equal specs.

    Args:
        runner: SGLang's model runner.

    Attributes:
        needs_cpu_seq_lens: whether SGLang must copy lengths to the host for each decode.
        max_context_len: the longest sequence.
        verify_mask: the buffer for the mask of a verification; None without trees.

    Raises:
        UnsupportedConfigError: the model or the options need something that attnlib does not
            support; with all reasons.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if reasons := rejections(runner):
            raise UnsupportedConfigError(
                f"attnlib cannot serve this model under SGLang: {'; '.join(reasons)}; use another "
                "--attention-backend",
                reasons=reasons,
            )
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._page_size = int(runner.page_size or 1)
        self.max_context_len = int(runner.model_config.context_len)
        self._device = torch.device(runner.device)
        self._layers = Layers(runner)
        self.needs_cpu_seq_lens = self._layers.needs_host_lengths()
        self._has_trees = verifies_trees(runner)
        drafted = getattr(runner.server_args, "speculative_num_draft_tokens", None)
        self._drafted = int(drafted or 0)
        self._trees: TreeMasks | None = None
        self._builders: dict[tuple[AttentionSpec, BatchLimits | None], Any] = {}
        self._graph_limits: BatchLimits | None = None
        self._buffers: GraphBuffers | None = None
        self._common: CommonAttentionMetadata | None = None
        self._host_lengths: torch.Tensor | None = None
        self._capturing = False
        self._batch: Any = None
        self._batches: dict[AttentionSpec, Any] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take a batch that runs outside of graphs."""
        if forward_batch.forward_mode.is_idle():
            return
        common = common_metadata(
            forward_batch, self._req_to_token, self._page_size, self.max_context_len
        )
        if self._has_tree(forward_batch):
            common = common.replace(query_bias=self._bias(forward_batch.spec_info, forward_batch))
        self._host_lengths = common.seq_lens_cpu
        self._begin(forward_batch, common, capturing=False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Take a batch that is captured or replayed. A replay calls no layer, so that metadata
        that a backend computes per batch is refreshed here, in the memory that the graph reads."""
        assert self._buffers is not None  # SGLang calls `init_cuda_graph_state` first
        follow = all(b.follows_device for (_, limits), b in self._builders.items() if limits)
        if follow and not in_capture and not self._has_tree(forward_batch):
            if self._buffers.fill_recorded(forward_batch, self._req_to_token):
                return
        common = self._buffers.fill(forward_batch, self._req_to_token)
        if self._has_tree(forward_batch):
            assert self._trees is not None
            bias = self._trees.fill(forward_batch.spec_info, forward_batch.seq_lens)
            common = common.replace(query_bias=bias)
        self._begin(forward_batch, common, capturing=in_capture)
        self._host_lengths = sequence_lengths(forward_batch)
        if not in_capture:
            for (_, limits), builder in self._builders.items():
                tree = builder.spec.mask_kind is MaskKind.QUERY_BIAS
                if limits and tree == (common.query_bias is not None) and not follow:
                    builder.build(0, self._common_of(builder))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record how lengths and slots follow from SGLang's tensors, so that a replay launches
        nothing for them. Graphs of trees record nothing."""
        if self._capturing and self._buffers and not self._has_tree(forward_batch):
            self._buffers.record(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read."""
        self._graph_limits = BatchLimits(
            max_num_reqs=max_bs, max_num_tokens=max_num_tokens, max_seq_len=self.max_context_len
        )
        self._buffers = GraphBuffers(
            max_bs, max_num_tokens, self.max_context_len, self._page_size, self._device
        )
        if self._has_trees and self._drafted:
            self._trees = TreeMasks(max_bs, self._drafted, self._device)

    @property
    def verify_mask(self) -> Any:
        """See the class."""
        return None if self._trees is None else self._trees.verify_mask

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Take the mask of the current batch again: the draft stage has filled it."""
        common, batch = self._common, self._batch
        if common is not None and common.query_bias is not None:
            common.query_bias.copy_(self._bias(spec_info, batch))

    def get_fused_kv_write_buffers(
        self, layer: Any, forward_batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The pool of a layer and the slots of the batch, for an operation of SGLang that rotates
        and writes; None where keys and values are latents or have scales."""
        buffers = self._layers.fused_write_buffers(layer)
        slots = forward_batch.out_cache_loc
        return None if buffers is None or slots is None else (*buffers, slots)

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
            save_kv_cache: whether to write k and v to the pool. Layers over keys of the heads of a
                model with latents never write.
            sinks: `[Hq]`, one sink logit per head.
            unsupported: refused unless None.

        Returns:
            `[T, Hq * Dv]`.

        Raises:
            UnsupportedConfigError: arguments, layers or batches that attnlib does not serve.
        """
        given = sorted(name for name, value in unsupported.items() if value is not None)
        if given:
            raise UnsupportedConfigError(
                f"attnlib has no implementation of {', '.join(given)}: use another "
                "--attention-backend",
                reasons=[f"{name} is not supported" for name in given],
            )
        assert self._common is not None
        attention, cache = self._layers.find(
            layer, sinks, trees=self._common.query_bias is not None
        )
        spec = attention.spec
        batch = self._batches.get(spec)
        if batch is None:
            batch = self._batches[spec] = self._build(attention)
        query = q.view(-1, spec.num_heads, spec.head_size)
        if k is None or v is None or (spec.is_paged and not save_kv_cache):
            k = v = None
        else:
            k = k.view(-1, spec.num_kv_heads, spec.head_size)
            v = v.view(-1, spec.num_kv_heads, spec.head_size_v)
        check_keys(layer, spec, saved=save_kv_cache, given=k is not None, batch=forward_batch)
        output: torch.Tensor = attention(query, k, v, cache, batch)
        return output.view(-1, spec.num_heads * spec.head_size_v)

    def _has_tree(self, batch: Any) -> bool:
        return self._has_trees and batch.forward_mode.is_target_verify()

    def _bias(self, spec_info: Any, batch: Any) -> torch.Tensor:
        if self._trees is not None:
            return self._trees.bias(spec_info, batch.seq_lens)
        return tree_bias(spec_info.custom_mask, batch.seq_lens, int(spec_info.draft_token_num))

    def _begin(self, batch: Any, common: CommonAttentionMetadata, *, capturing: bool) -> None:
        self._batch, self._common, self._capturing, self._batches = batch, common, capturing, {}

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
        return builder.build(0, self._common_of(builder))

    def _common_of(self, builder: Any) -> CommonAttentionMetadata:
        """The current batch, with host lengths only where the builder needs them: those of a
        captured batch hold for no replay. On a CPU the batch's own tensor serves."""
        assert self._common is not None
        common = self._common
        if not builder.spec.is_paged:
            common = common.replace(block_table_tensor=None, slot_mapping=None)
        if not builder.needs_host_lengths or self._device.type == "cpu":
            return common
        host = self._host_lengths
        return common.replace(seq_lens_cpu=common.seq_lens.cpu() if host is None else host)
