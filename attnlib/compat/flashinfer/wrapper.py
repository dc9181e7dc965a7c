"""What FlashInfer's wrappers over a paged cache share: plan a batch once, run it per layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.compat.flashinfer.arguments import check_tensors, flag, number
from attnlib.compat.flashinfer.graph_batch import GraphBatch
from attnlib.compat.flashinfer.merge import LOG2_E
from attnlib.compat.flashinfer.page import cache_views, check_layout
from attnlib.compat.flashinfer.page_lists import PageLists
from attnlib.compat.flashinfer.plan import LayerForm, Plan, batch_of
from attnlib.compat.flashinfer.run_arguments import RunArguments
from attnlib.errors import UnsupportedConfigError
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec

__all__ = ["PagedWrapper"]

Backend = type[AttentionBackend]


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
        check_tensors(float_workspace_buffer=float_workspace_buffer)
        use_cuda_graph = flag("use_cuda_graph", use_cuda_graph)
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
        self._plan_: Plan | None = None
        self._metadata: tuple[Backend, AttentionMetadata] | None = None
        self._layers: dict[tuple[AttentionSpec, float, Backend], Attention] = {}
        self._builders: dict[tuple[AttentionSpec, Backend], AttentionMetadataBuilder[Any]] = {}
        self._fixed: GraphBatch | None = None

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

    def _plan_batch(self, form: LayerForm, lists: PageLists) -> None:
        spec = form.spec(lists.longest_query <= 1)
        if self._is_fixed:
            common = self._graph_batch(lists).fill(lists, form.page_size)
        else:
            common = batch_of(lists, self.device)
        planned = self._plan_
        self._plan_ = Plan(form, spec, lists, common)
        # A captured run reads the metadata's buffers, whose values have changed.
        if not (self._is_fixed and planned is not None and planned.spec == spec):
            self._metadata = None

    @property
    def _is_fixed(self) -> bool:
        return self._use_cuda_graph and self.device.type == "cuda"

    def _graph_batch(self, lists: PageLists) -> GraphBatch:
        if self._fixed is None:
            pages = self._graph_buffers[1]
            assert pages is not None  # checked by the constructor
            workspace = self._float_workspace_buffer
            self._fixed = GraphBatch(lists.num_reqs, pages.numel(), workspace)
        return self._fixed

    def _run(self, call: RunArguments) -> Any:
        plan = self._plan_
        if plan is None:
            raise RuntimeError("run before plan: call plan(...) with the batch first")
        call = call._replace(return_lse=flag("return_lse", call.return_lse))
        call.check(plan)
        keys, values = cache_views(call.paged_kv_cache, self._kv_layout)
        plan.lists.check_pages(keys.shape[0])
        q, scale = call.q, plan.form.scale
        if call.q_scale is not None:
            scale *= number("q_scale", call.q_scale)
        scales: dict[str, Any] = {}
        if plan.spec.is_kv_quantized:
            given = {"k_scale": call.k_scale, "v_scale": call.v_scale}
            scales = {name: _scale(x) for name, x in given.items() if x is not None}
        elif isinstance(call.k_scale, torch.Tensor):
            q = (q * call.k_scale.reshape(())).to(q.dtype)
        elif call.k_scale is not None:
            scale *= number("k_scale", call.k_scale)
        layer = self._layer(plan.spec, scale)
        metadata = self._metadata_for(layer, plan, q.shape[0], call.query_len)
        cache = PagedKVCache.from_views(keys, values, **scales)
        result = layer(q, None, None, cache, metadata, call.return_lse, output=call.out)
        output, natural = result if call.return_lse else (result, None)
        if call.v_scale is not None and not plan.spec.is_kv_quantized:
            value = call.v_scale
            output.mul_(value if isinstance(value, torch.Tensor) else number("v_scale", value))
        if natural is None:
            return output
        return output, torch.mul(natural, LOG2_E, out=call.lse)

    def _override(
        self, causal: bool, window_left: int, logits_soft_cap: float | None, sm_scale: float | None
    ) -> None:
        """Change the plan as the deprecated `forward` does, for this and later runs."""
        plan = self._plan_
        if plan is None:
            return  # `run` raises
        form = replace(
            plan.form,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        changed = plan.with_form(form)
        if changed.spec != plan.spec:
            self._metadata = None
        self._plan_ = changed

    def _layer(self, spec: AttentionSpec, scale: float) -> Attention:
        """The layer on the backend that is selected now: `use_backend` and the environment may
        change between runs."""
        backend = get_attn_backend(spec, None, self.device)
        found = self._layers.get((spec, scale, backend))
        if found is None:
            found = Attention(spec, backend=backend, scale=scale, device=self.device)
            self._layers[spec, scale, backend] = found
        return found

    def _metadata_for(
        self, layer: Attention, plan: Plan, num_tokens: int, query_len: int | None
    ) -> AttentionMetadata:
        backend = layer.backend
        if self._metadata is not None and self._metadata[0] is backend:
            kept = self._metadata[1]
            if not self._is_fixed or getattr(kept, "num_actual_tokens", 0) == num_tokens:
                return kept
        builder = self._builders.get((plan.spec, backend))
        if builder is None:
            builder = backend.make_builder(plan.spec, self.device)
            self._builders[plan.spec, backend] = builder
        metadata: AttentionMetadata
        if not self._is_fixed:
            metadata = builder.build(0, plan.common)
        elif builder.needs_host_lengths:
            raise UnsupportedConfigError(
                f"backend {backend.get_name()} reads lengths on the host, which a captured run "
                "does not see: use a backend that reads them on the device, for example triton",
                backend=backend.get_name(),
                reasons=["cudagraph"],
            )
        else:
            longest = num_tokens if query_len is None else query_len
            metadata = builder.build_for_cudagraph_capture(
                plan.common.replace(num_actual_tokens=num_tokens, max_query_len=longest)
            )
        self._metadata = (backend, metadata)
        return metadata


def _scale(scale: float | torch.Tensor) -> float | torch.Tensor:
    """A KV scale as `PagedKVCache` takes it."""
    if isinstance(scale, torch.Tensor):
        return scale.float().reshape(()) if scale.numel() == 1 else scale.float()
    return float(scale)
