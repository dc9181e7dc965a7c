"""Per-layer attention of the `flash_attn` backend: one call by keyword, and output conversion."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.backends._foreign.outputs import (
    apply_sinks,
    clear_rows,
    fill_empty,
    find_rows_without_keys,
    is_capturing,
    store_lse,
)
from attnlib.backends.base import AttentionImpl, StepPlan
from attnlib.backends.flash_attn.descales import Descales
from attnlib.backends.flash_attn.metadata import FlashAttnMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError

__all__ = ["FlashAttnImpl"]

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class _RoundedSinks:
    """Sinks, their version counter, and their bfloat16 form, or None if it is not exact."""

    sinks: torch.Tensor
    version: int
    rounded: torch.Tensor | None


class FlashAttnImpl(AttentionImpl):
    """Attention by FlashAttention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rounded_sinks: _RoundedSinks | None = None
        self._descales = Descales()
        sinks = self.per_head_tensors[1]
        if sinks is not None and not sinks.is_meta:
            _ = self._sinks_bf16  # compare on the device here, not while a graph is captured

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: FlashAttnMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> StepPlan | None:
        """Checks the cache before it is written; there is nothing to prepare."""
        _check_alignment(cache, self.prefix)
        return None

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: FlashAttnMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        tokens = metadata.num_actual_tokens
        if tokens and metadata.num_reqs and metadata.max_seq_len:
            self._attend(
                query[:tokens],
                cache,
                metadata,
                output[:tokens],
                None if lse is None else lse[:tokens],
            )
        else:
            fill_empty(output, lse, self.sinks)
        clear_rows(
            output,
            lse,
            metadata.query_start_loc,
            None if is_capturing(output) else metadata.num_unpadded_tokens,
        )

    def _attend(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: FlashAttnMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        kernel = metadata.kernel
        _check_alignment(cache, self.prefix)
        separate_sinks = self._separate_sinks()
        arguments = self._call(query, cache, metadata)
        needs_lse = lse is not None or separate_sinks is not None
        lse_flag = kernel.keywords.first("return_softmax_lse", "return_lse", "return_attn_probs")
        if needs_lse and lse_flag is not None:
            arguments[lse_flag] = True
        if "out" in kernel.keywords:
            arguments["out"] = output
        result = kernel.function(**arguments)
        attended, kernel_lse = (
            (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        )
        if attended.data_ptr() != output.data_ptr():
            output.copy_(attended)
        if not needs_lse or kernel_lse is None:
            return
        target = (
            torch.empty(output.shape[:2], dtype=torch.float32, device=output.device)
            if lse is None
            else lse
        )
        store_lse(kernel_lse.t(), target)
        if kernel.version == 2:  # it writes no LSE for requests without keys
            rows = slice(0, metadata.num_actual_tokens)
            empty = find_rows_without_keys(
                metadata.query_start_loc, metadata.seq_lens, rows, up_to_own=False
            )
            target.masked_fill_(empty.unsqueeze(-1), -torch.inf)
        if separate_sinks is not None:
            apply_sinks(output, target, separate_sinks)
        elif self.sinks is not None:  # the denominator of an empty row is the sink alone
            torch.where(torch.isneginf(target), self.sinks, target, out=target)

    @property
    def _sinks_bf16(self) -> torch.Tensor | None:
        """The sinks in bfloat16, or None if bfloat16 does not represent them exactly.

        The comparison synchronizes; it is repeated only when the sinks are replaced or modified.
        """
        sinks = self.per_head_tensors[1]
        if sinks is None:
            return None
        known = self._rounded_sinks
        version = 0 if sinks.is_inference() else sinks._version  # inference tensors have none
        if known is None or known.sinks is not sinks or known.version != version:
            rounded = sinks.to(torch.bfloat16)
            # +inf is left to `apply_sinks`, which makes it NaN (M4).
            exact = bool(((rounded.to(sinks.dtype) == sinks) & (sinks != torch.inf)).all())
            known = _RoundedSinks(sinks, version, rounded if exact else None)
            self._rounded_sinks = known
        return known.rounded

    def _separate_sinks(self) -> torch.Tensor | None:
        """The sinks that are applied after the kernel, from the LSE.

        FlashAttention 3 and vLLM's build of 4 take sinks in bfloat16 only; these are the sinks that
        they would round.
        """
        return self.sinks if self._sinks_bf16 is None else None

    def _call(
        self, query: torch.Tensor, cache: PagedKVCache, metadata: FlashAttnMetadata
    ) -> dict[str, Any]:
        kernel, spec = metadata.kernel, self.spec
        keywords = kernel.keywords
        keys, absorbed = cache.key_cache, {}
        if spec.use_mla:
            # The rotary parts are queries and keys; the rest of the queries meets the values.
            absorbed = {keywords.first("qv", "q_v") or "qv": query[..., : spec.head_size_v]}
            query, keys = query[..., spec.head_size_v :], keys[..., spec.head_size_v :]
        arguments: dict[str, Any] = {
            "q": query,
            **absorbed,
            keywords.first("k_cache", "k") or "k": keys,
            keywords.first("v_cache", "v") or "v": cache.value_cache,
            "cu_seqlens_q": metadata.query_start_loc,
            "max_seqlen_q": metadata.query_bound,
            keywords.first("block_table", "page_table") or "block_table": metadata.block_table,
            "softmax_scale": self.scale,
            "causal": metadata.causal,
            "window_size": tuple(
                kernel.unbounded if side < 0 else side
                for side in spec.visible_window.as_kernel_args()
            ),
            **kernel.select,
        }
        lengths = keywords.first("seqused_k", "cache_seqlens")
        if lengths is None:
            arguments["cu_seqlens_k"] = metadata.key_start_loc
        else:
            arguments[lengths] = metadata.seq_lens
        if kernel.takes_key_bound:
            arguments["max_seqlen_k"] = metadata.key_bound
        self._add_features(arguments, query, cache, metadata)
        return arguments

    def _add_features(
        self,
        arguments: dict[str, Any],
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: FlashAttnMetadata,
    ) -> None:
        kernel, spec = metadata.kernel, self.spec
        if spec.logits_soft_cap:
            arguments["softcap"] = spec.logits_soft_cap
        if self.alibi_slopes is not None:
            arguments["alibi_slopes"] = self.alibi_slopes
        if self.sinks is not None and self._separate_sinks() is None:
            name = kernel.keywords.first("s_aux", "sinks", "sink", "learnable_sink") or "s_aux"
            arguments[name] = self._sinks_bf16
        if metadata.num_splits is not None:
            arguments["num_splits"] = metadata.num_splits
        if kernel.version == 3:
            if metadata.scheduler_metadata is not None:
                arguments["scheduler_metadata"] = metadata.scheduler_metadata
            if spec.is_kv_quantized:
                self._descales.add_to(arguments, query, cache, metadata.num_reqs)


def _check_alignment(cache: PagedKVCache, prefix: str) -> None:
    """Check that the cache allows the kernels' 16-byte loads.

    Raises:
        ContractError: a stride that is not a multiple of 16 bytes.
    """
    size = cache.dtype.itemsize
    for name, view in (("key_cache", cache.key_cache), ("value_cache", cache.value_cache)):
        for axis in range(3):
            if view.shape[axis] > 1 and view.stride(axis) * size % _ALIGNMENT_BYTES:
                raise ContractError(
                    f"{name} of layer {prefix or '(unnamed)'} has stride {view.stride(axis)} along "
                    f"dimension {axis}, {view.stride(axis) * size} bytes; FlashAttention needs "
                    f"multiples of {_ALIGNMENT_BYTES} bytes: choose triton for this cache",
                    rule="P1",
                )
