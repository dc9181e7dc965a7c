"""What FlashInfer's wrappers over a paged cache share: plan a batch once, run it per layer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.compat.flashinfer.merge import LOG2_E
from attnlib.compat.flashinfer.page import (
    PagedCache,
    cache_views,
    check_layout,
    get_seq_lens,
    page_table,
)
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, MaskKind, Window

__all__ = ["REASONS", "PagedWrapper", "check_neutral", "torch_dtype", "warn_positional"]

REASONS = {
    "pos_encoding_mode": "attnlib does not rotate or bias keys by position inside the kernels: "
    "rotate q and the keys before they are cached",
    "custom_mask": "a mask over cached keys is not implemented; trees of new tokens have "
    "CommonAttentionMetadata.query_bias",
    "packed_custom_mask": "a mask over cached keys is not implemented; trees of new tokens have "
    "CommonAttentionMetadata.query_bias",
    "jit_args": "attention variants in CUDA C++ are FlashInfer's own",
    "jit_kwargs": "attention variants in CUDA C++ are FlashInfer's own",
    "window_right": "the wrapper's window has no right side but the causal mask",
    "prefix_len_ptr": "scoring of several items is not implemented",
    "token_pos_in_items_ptr": "scoring of several items is not implemented",
    "max_item_len_ptr": "scoring of several items is not implemented",
    "sinks": "the wrapper takes no sinks: use attnlib.Attention(spec, sinks=...)",
    "kv_cache_sf": "caches of 4-bit elements are not implemented",
    "skip_softmax_threshold_scale_factor": "attnlib skips no keys",
    "o_data_type": "the output has the dtype of q",
    "args": "additional arguments belong to attention variants in CUDA C++",
}
"""Why an argument is refused, by its name."""


@dataclass(frozen=True)
class _Plan:
    """A planned batch.

    Attributes:
        spec: of the layers.
        scale: softmax scale.
        common: the batch.
        window_left: as given to `plan`.
        is_single: whether no request has more than one query.
    """

    spec: AttentionSpec
    scale: float
    common: CommonAttentionMetadata
    window_left: int
    is_single: bool


class PagedWrapper:
    """Base of the wrappers.

    With `use_cuda_graph`, lengths and tables are in buffers of fixed addresses, so that `plan`
    between replays changes the batch of a captured `run`. The block table is in the float
    workspace; the kernels of attnlib have a workspace of their own.

    Args:
        float_workspace_buffer: its device is the wrapper's.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: whether `run` will be captured.
        graph_buffers: the caller's buffers of page lists, whose sizes bound later plans.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        graph_buffers: tuple[torch.Tensor | None, ...],
    ) -> None:
        check_layout(kv_layout)
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._float_workspace_buffer = float_workspace_buffer
        self._graph_buffers = graph_buffers
        if use_cuda_graph and any(buffer is None for buffer in graph_buffers):
            raise ValueError(
                "use_cuda_graph=True needs every buffer of the page lists: pass paged_kv_indptr, "
                "paged_kv_indices, paged_kv_last_page_len (and qo_indptr for prefill) buffers"
            )
        self._plan_: _Plan | None = None
        self._metadata: AttentionMetadata | None = None
        self._layers: dict[Any, Attention] = {}
        self._builders: dict[Any, AttentionMetadataBuilder[Any]] = {}
        self._fixed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether lengths and tables are in buffers of fixed addresses."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Use another workspace; plan again afterwards. `int_workspace_buffer` is not used."""
        self._float_workspace_buffer = float_workspace_buffer
        self._fixed = self._plan_ = self._metadata = None

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def _plan_batch(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_sizes: tuple[int, int],
        page_size: int,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Plan a batch; reads the page lists on the host, as FlashInfer does."""
        starts, ends, last = (
            x.to("cpu", torch.int32) for x in (qo_indptr, kv_indptr, last_page_len)
        )
        requests = last.shape[0]
        if starts.shape != (requests + 1,) or ends.shape != (requests + 1,):
            raise ContractError(
                f"indptr tensors have shapes {tuple(starts.shape)} and {tuple(ends.shape)}, but "
                f"last_page_len has {requests} requests: they must be [{requests + 1}]"
            )
        lengths = get_seq_lens(ends, last, page_size).to(torch.int32)
        query_lens = starts.diff()
        longest = int(query_lens.max()) if requests else 0
        is_single = longest <= 1  # a single query is the last position: every mask is causal
        spec = AttentionSpec(
            num_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_sizes[0],
            head_size_v=head_sizes[1],
            dtype=q_data_type,
            kv_cache_dtype=kv_data_type,
            block_size=page_size,
            needs_lse=True,
            **_mask(causal or is_single, window_left, logits_soft_cap),
        )
        pages = max(int(ends.diff().max()), 1) if requests else 1
        on_device = [
            x.to(self.device, torch.int32, non_blocking=True)
            for x in (starts, ends, lengths, kv_indices)
        ]
        scale = head_sizes[0] ** -0.5 if sm_scale is None else float(sm_scale)
        if self._is_fixed:
            common = self._fixed_batch(on_device, pages, page_size, int(starts[-1]))
        else:
            table = page_table(on_device[1], on_device[3], pages)
            common = CommonAttentionMetadata(
                query_start_loc=on_device[0],
                query_start_loc_cpu=starts,
                seq_lens=on_device[2],
                seq_lens_cpu=lengths,
                num_computed_tokens_cpu=(lengths - query_lens).clamp(min=0),
                num_reqs=requests,
                num_actual_tokens=int(starts[-1]),
                max_query_len=longest,
                max_seq_len=int(lengths.max()) if requests else 0,
                block_table_tensor=table,
            )
        planned = self._plan_
        keeps = self._is_fixed and planned is not None and planned.spec == spec
        self._plan_ = _Plan(spec, scale, common, window_left, is_single)
        if not keeps:  # a captured run reads the metadata's buffers, whose values have changed
            self._metadata = None

    @property
    def _is_fixed(self) -> bool:
        return self._use_cuda_graph and self.device.type == "cuda"

    def _fixed_batch(
        self, on_device: list[torch.Tensor], pages: int, page_size: int, num_tokens: int
    ) -> CommonAttentionMetadata:
        """The batch in buffers of fixed addresses."""
        starts, ends, lengths, indices = on_device
        requests = lengths.shape[0]
        if self._fixed is None:
            indices_buffer = self._graph_buffers[1]
            assert indices_buffer is not None  # checked by the constructor
            scratch = self._float_workspace_buffer.view(torch.uint8)
            scratch = scratch[: scratch.numel() // 4 * 4].view(torch.int32)
            width = min(indices_buffer.numel(), scratch.numel() // max(requests, 1))
            table = scratch[: requests * width].view(requests, width)
            self._fixed = (torch.empty_like(starts), torch.empty_like(lengths), table)
        fixed_starts, fixed_lengths, table = self._fixed
        if lengths.shape != fixed_lengths.shape or pages > table.shape[1]:
            raise ContractError(
                f"this plan has {requests} requests of up to {pages} pages; the first plan with "
                f"use_cuda_graph=True fixed {table.shape[0]} requests of up to {table.shape[1]} "
                "pages: give the wrapper larger buffers"
            )
        fixed_starts.copy_(starts)
        fixed_lengths.copy_(lengths)
        page_table(ends, indices, table.shape[1], out=table)
        return CommonAttentionMetadata(
            query_start_loc=fixed_starts,
            seq_lens=fixed_lengths,
            num_reqs=requests,
            num_actual_tokens=num_tokens,
            max_query_len=num_tokens,
            max_seq_len=table.shape[1] * page_size,
            block_table_tensor=table,
        )

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        q_scale: float | None,
        k_scale: float | torch.Tensor | None,
        v_scale: float | torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        window_left: int | None,
        uniform_query_len: int | None,
    ) -> Any:
        plan = self._plan_
        if plan is None:
            raise RuntimeError("run before plan: call plan(...) with the batch first")
        if window_left is not None and window_left != plan.window_left:
            raise ValueError(
                f"window_left={window_left} differs from window_left={plan.window_left} of plan"
            )
        keys, values = cache_views(paged_kv_cache, self._kv_layout)
        scale = plan.scale * (1.0 if q_scale is None else float(q_scale))
        scales: dict[str, Any] = {}
        if plan.spec.is_kv_quantized:
            given = {"k_scale": k_scale, "v_scale": v_scale}
            scales = {name: _scale(x) for name, x in given.items() if x is not None}
        elif k_scale is not None:
            if isinstance(k_scale, torch.Tensor):
                q = (q * k_scale).to(q.dtype)
            else:
                scale *= float(k_scale)
        layer = self._layer(plan.spec, scale)
        metadata = self._metadata_for(layer, plan, q.shape[0], uniform_query_len)
        cache = PagedKVCache.from_views(keys, values, **scales)
        result = layer(q, None, None, cache, metadata, return_lse, output=out)
        output, natural = result if return_lse else (result, None)
        if v_scale is not None and not plan.spec.is_kv_quantized:
            output.mul_(v_scale)
        if natural is None:
            return output
        return output, torch.mul(natural, LOG2_E, out=lse)

    def _override(
        self,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
    ) -> None:
        """Change the plan as the deprecated `forward` does, for this and later runs."""
        plan = self._plan_
        if plan is None:
            return  # `run` raises
        spec = plan.spec.replace(**_mask(causal or plan.is_single, window_left, logits_soft_cap))
        scale = spec.head_size**-0.5 if sm_scale is None else float(sm_scale)
        if spec != plan.spec:
            self._metadata = None
        self._plan_ = replace(plan, spec=spec, scale=scale, window_left=window_left)

    def _layer(self, spec: AttentionSpec, scale: float) -> Attention:
        found = self._layers.get((spec, scale))
        if found is None:
            found = Attention(spec, scale=scale, device=self.device)
            self._layers[spec, scale] = found
        return found

    def _metadata_for(
        self, layer: Attention, plan: _Plan, num_tokens: int, uniform_query_len: int | None
    ) -> AttentionMetadata:
        if self._metadata is not None and (
            not self._is_fixed or getattr(self._metadata, "num_actual_tokens", 0) == num_tokens
        ):
            return self._metadata
        builder = self._builders.get((layer.backend, plan.spec))
        if builder is None:
            builder = layer.backend.make_builder(plan.spec, self.device)
            self._builders[layer.backend, plan.spec] = builder
        metadata: AttentionMetadata
        if not self._is_fixed:
            metadata = builder.build(0, plan.common)
        elif builder.needs_host_lengths:
            raise UnsupportedConfigError(
                f"backend {layer.backend.get_name()} reads lengths on the host, which a captured "
                "run does not see: use a backend that reads them on the device, for example triton",
                backend=layer.backend.get_name(),
                reasons=["cudagraph"],
            )
        else:
            longest = num_tokens if uniform_query_len is None else uniform_query_len
            metadata = builder.build_for_cudagraph_capture(
                plan.common.replace(num_actual_tokens=num_tokens, max_query_len=longest)
            )
        self._metadata = metadata
        return metadata


def _mask(causal: bool, window_left: int, logits_soft_cap: float | None) -> dict[str, Any]:
    """Fields of a spec."""
    return {
        "mask_kind": MaskKind.CAUSAL if causal else MaskKind.BIDIRECTIONAL,
        "sliding_window": window_left + 1 if causal and window_left >= 0 else None,
        "window": Window(window_left, None) if not causal and window_left >= 0 else None,
        "logits_soft_cap": logits_soft_cap or None,
    }


def _scale(scale: float | torch.Tensor) -> float | torch.Tensor:
    """A KV scale as `PagedKVCache` takes it."""
    if isinstance(scale, torch.Tensor):
        return scale.float().reshape(()) if scale.numel() == 1 else scale.float()
    return float(scale)


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype by name or itself.

    Raises:
        ContractError: no dtype of torch has this name.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ContractError(f"dtype {dtype!r} is no dtype of torch: pass for example 'float16'")
    return found


def check_neutral(**arguments: Any) -> None:
    """Refuse arguments that attnlib does not serve.

    Args:
        arguments: their values; None, 0, False, "NONE" and () have no effect.

    Raises:
        UnsupportedConfigError: an argument has another value; the message has the reason.
    """
    for name, value in arguments.items():
        neutral = value is None or (
            not isinstance(value, torch.Tensor) and value in (0, False, "NONE", ())
        )
        if not neutral:
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedConfigError(f"{name}={shown}: {REASONS[name]}", reasons=[name])


def warn_positional(name: str) -> None:
    """Warn that optional arguments of `plan` were passed by position, as FlashInfer does."""
    warnings.warn(
        f"optional arguments of {name}.plan by position are deprecated in FlashInfer: pass them by "
        "keyword",
        DeprecationWarning,
        stacklevel=3,
    )
