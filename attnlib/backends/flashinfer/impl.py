"""Per-layer attention of the `flashinfer` backend: run the plan, and output conversion."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from attnlib.backends._foreign.outputs import (
    apply_sinks,
    clear_rows,
    convert_base2_lse,
    fill_empty,
    is_capturing,
    rows_without_keys,
)
from attnlib.backends.base import AttentionImpl, StepPlan
from attnlib.backends.flashinfer.batch import plan_key
from attnlib.backends.flashinfer.metadata import FlashInferMetadata
from attnlib.backends.flashinfer.plans import Lease, PlanKey
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.ops.scales import valid_scale

__all__ = ["FlashInferImpl"]


class FlashInferImpl(AttentionImpl):
    """Attention by FlashInfer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        left, right = self.spec.visible_window.as_kernel_args()
        self._key = plan_key(PerLayerParameters(left, self.spec.logits_soft_cap, self.scale, right))

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: FlashInferMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> StepPlan | None:
        """Checks the cache and the plans of the batch before anything is written; FlashInfer's own
        plans were made with the batch."""
        _check_strides(cache, self.prefix)
        for plans in (metadata.decode_plans, metadata.prefill_plans):
            if plans:
                self._plan(plans)
        return None

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: FlashInferMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        split, end = metadata.num_decode_tokens, metadata.num_actual_tokens
        for plans, rows in (
            (metadata.decode_plans, slice(0, split)),
            (metadata.prefill_plans, slice(split, end)),
        ):
            part_lse = None if lse is None else lse[rows]
            if plans:
                self._run(self._plan(plans), query, cache, output, part_lse, metadata, rows)
            elif rows.start < rows.stop:
                fill_empty(output[rows], part_lse, self.sinks)
        clear_rows(
            output,
            lse,
            metadata.query_start_loc,
            None if is_capturing(output) else metadata.num_unpadded_tokens,
        )

    def _plan(self, plans: Mapping[PlanKey, Lease]) -> Any:
        lease = plans.get(self._key)
        if lease is None:
            planned = "; ".join(str(key) for key in plans)
            raise UnsupportedConfigError(
                f"layer {self.prefix or '(unnamed)'} needs a plan for {self._key}, but the batch "
                f"was planned for {planned}: pass all layers to the builder "
                "(layers=get_per_layer_parameters(...))",
                backend="flashinfer",
            )
        return lease.wrapper

    def _run(
        self,
        wrapper: Any,
        query: torch.Tensor,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        metadata: FlashInferMetadata,
        rows: slice,
    ) -> None:
        _check_strides(cache, self.prefix)
        query, output = query[rows], output[rows]
        k_scale, v_scale = cache.k_scale, cache.v_scale
        if isinstance(k_scale, torch.Tensor):
            # `run` takes a float. A factor of the query does not need the value on the host.
            k_scale = valid_scale(k_scale)
            query = (query.float() * k_scale).to(query.dtype)
        packed, kernel_lse = _packed(
            output, lse, metadata.scratch, needs_lse=lse is not None or self.sinks is not None
        )
        wrapper.run(
            q=query,
            paged_kv_cache=(cache.key_cache, cache.value_cache),
            q_scale=self.scale,
            k_scale=k_scale if isinstance(k_scale, float) else None,
            v_scale=v_scale if isinstance(v_scale, float) else None,
            out=packed,
            lse=kernel_lse,
            return_lse=kernel_lse is not None,
        )
        scaled = isinstance(k_scale, torch.Tensor) or isinstance(v_scale, torch.Tensor)
        if scaled or kernel_lse is not None:
            up_to_own = bool(metadata.causal) or self._key.window_right == 0
            places = metadata.scratch[len(metadata.scratch) - len(query) :].view(torch.bool)
            empty = rows_without_keys(metadata, rows, up_to_own, places)
            if scaled:
                _apply_scales(packed, kernel_lse, empty, k_scale, v_scale)
            if kernel_lse is not None:
                target = kernel_lse if lse is None else lse
                convert_base2_lse(kernel_lse, target, empty)
                if self.sinks is not None:
                    apply_sinks(packed, target, self.sinks)
        if packed is not output:
            output.copy_(packed)


def _apply_scales(
    output: torch.Tensor,
    lse: torch.Tensor | None,
    empty: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> None:
    """Multiply by the value scale; NaN of a scale reaches the rows that see keys (M5, M9)."""
    if isinstance(v_scale, torch.Tensor):
        output.mul_(valid_scale(v_scale))
    if isinstance(k_scale, torch.Tensor):
        # The kernel may take a row whose scores are all NaN for an empty one.
        output.masked_fill_(k_scale.isnan(), torch.nan)
        if lse is not None:
            lse.masked_fill_(k_scale.isnan(), torch.nan)
    output.masked_fill_(empty[:, None, None], 0)


def _packed(
    output: torch.Tensor, lse: torch.Tensor | None, scratch: torch.Tensor, *, needs_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and LSE for the kernel: the caller's if contiguous, else views of `scratch`."""
    rows, heads, size = output.shape
    end = rows * heads * size * output.element_size()
    packed = (
        output if output.is_contiguous() else scratch[:end].view(output.dtype).view(output.shape)
    )
    if not needs_lse:
        return packed, None
    if lse is not None and lse.is_contiguous():
        return packed, lse
    start = -(-end // 256) * 256
    return packed, scratch[start : start + rows * heads * 4].view(torch.float32).view(rows, heads)


def _check_strides(cache: PagedKVCache, prefix: str) -> None:
    if cache.key_cache.stride() != cache.value_cache.stride():
        raise ContractError(
            f"keys of layer {prefix or '(unnamed)'} have strides {cache.key_cache.stride()} and "
            f"values {cache.value_cache.stride()}; flashinfer needs equal strides: "
            "choose triton for this cache",
            rule="P1",
        )
