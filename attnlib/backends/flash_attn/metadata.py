"""Metadata of the `flash_attn` backend: one varlen call per batch, its kernel and its schedule.

The kernels compute decodes and prefills in one launch, so the batch is not split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from attnlib.backends._foreign.imports import keywords_of
from attnlib.backends.flash_attn.kernel import FlashKernel
from attnlib.backends.flash_attn.limits import key_splits
from attnlib.backends.flash_attn.support import choose_kernel
from attnlib.device import resolve_device
from attnlib.errors import BackendUnavailableError, ContractError, UnsupportedConfigError
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata, paged_fields
from attnlib.metadata.strides import refuse_strided
from attnlib.spec import AttentionSpec, CudaGraphSupport

__all__ = ["FlashAttnMetadata", "FlashAttnMetadataBuilder"]


@dataclass(kw_only=True)
class FlashAttnMetadata(PagedMetadata):
    """A batch for FlashAttention.

    Attributes:
        kernel: the installed kernel that computes it.
        num_unpadded_tokens: tokens of requests, without the padding of a graph's batch; None if
            only the device knows it (capture, no host lengths).
        num_splits: the `num_splits` that the kernel gets; None leaves it out.
        query_bound: the bound on query lengths that the kernel gets.
        key_bound: the bound on sequence lengths that the kernel uses.
        key_start_loc: `[R + 1]` int32, cumulative sum of `seq_lens`, for kernels that need it.
        scheduler_metadata: `[n]` int32, the schedule of the batch; None lets each call compute it.
    """

    fixed_fields: ClassVar[frozenset[str]] = frozenset(
        {"query_start_loc", "seq_lens", "block_table", "causal", "max_query_len", "max_seq_len"}
    )

    kernel: FlashKernel
    num_unpadded_tokens: int | None
    num_splits: int | None
    query_bound: int
    key_bound: int
    key_start_loc: torch.Tensor | None = None
    scheduler_metadata: torch.Tensor | None = None


class FlashAttnMetadataBuilder(AttentionMetadataBuilder[FlashAttnMetadata]):
    """Chooses the kernel once, and schedules each batch once instead of once per layer.

    Raises:
        BackendUnavailableError: no FlashAttention is installed.
        UnsupportedConfigError: no installed kernel supports the spec; `reasons` has all reasons.
    """

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.UNIFORM_BATCH
    needs_host_lengths: ClassVar[bool] = False  # host lengths only allow a smaller bound

    def __init__(
        self, spec: AttentionSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(spec, device, **kwargs)
        info = resolve_device(self.device)
        kernel, reasons = choose_kernel(spec, info, self.config)
        if kernel is None and not reasons:
            raise BackendUnavailableError(
                "no FlashAttention is installed: pip install flash-attn, "
                "or pip install --pre flash-attn-4"
            )
        if kernel is None:
            raise UnsupportedConfigError(
                "no installed FlashAttention supports this spec: " + "; ".join(reasons),
                backend="flash_attn",
                reasons=reasons,
            )
        self.kernel = kernel
        self._num_splits = key_splits(kernel, info, self.config)
        self._aot = kernel.scheduler is not None and bool(self.config.get("aot_schedule", True))
        rounded = -(-self.limits.max_num_reqs // 4) * 4 if self.limits else 0
        self._schedule = (
            torch.zeros(1 + 4 * rounded, dtype=torch.int32, device=self.device)
            if self._aot and self.limits
            else None
        )
        self._key_starts = (
            torch.zeros(1 + rounded, dtype=torch.int32, device=self.device)
            if not kernel.takes_lengths and self.limits
            else None
        )
        self._captured_bounds: dict[tuple[int, int], int] = {}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttnMetadata:
        """The metadata of one batch; without a schedule if `fast_build`."""
        return self._build(common_attn_metadata, schedule=not fast_build, for_capture=False)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttnMetadata:
        """As `build`, independent of everything that differs between the batches of a graph.

        Raises:
            ContractError: the batch has strided metadata.
        """
        refuse_strided(common_attn_metadata)
        return self._build(common_attn_metadata, schedule=True, for_capture=True)

    def update_block_table(
        self, metadata: FlashAttnMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FlashAttnMetadata:
        """The same batch with other blocks; drops a schedule for another table width."""
        changed = replace(
            metadata,
            block_table=block_table,
            slot_mapping=slot_mapping,
            key_bound=self._key_bound(block_table, metadata.max_seq_len),
        )
        return (
            changed
            if changed.key_bound == metadata.key_bound
            else replace(changed, scheduler_metadata=None)
        )

    def _build(
        self, common: CommonAttentionMetadata, *, schedule: bool, for_capture: bool
    ) -> FlashAttnMetadata:
        fields = paged_fields(common, self.spec, None, needs_host_lengths=self.needs_host_lengths)
        _check(common)
        starts = None if for_capture else common.query_start_loc_cpu
        query_bound = self._query_bound(common, for_capture)
        key_bound = self._key_bound(fields["block_table"], common.max_seq_len)
        metadata = FlashAttnMetadata(
            **fields,
            kernel=self.kernel,
            num_unpadded_tokens=None if starts is None else int(starts[-1]),
            num_splits=self._num_splits,
            query_bound=query_bound,
            key_bound=self._bound_of_capture(
                (common.num_reqs, query_bound), key_bound, for_capture
            ),
            key_start_loc=None if self.kernel.takes_lengths else self._running_sum(common.seq_lens),
        )
        if schedule and self._aot and metadata.num_actual_tokens and metadata.max_seq_len:
            metadata.scheduler_metadata = self._scheduled(metadata)
        return metadata

    def _query_bound(self, common: CommonAttentionMetadata, for_capture: bool) -> int:
        """The bound on query lengths.

        FlashAttention 2 ignores `cu_seqlens_q` if the bound is 1 and takes row r for request r.
        That is only right if every request has one token; otherwise the bound is 2.
        """
        if self.kernel.version != 2 or common.max_query_len != 1:
            return common.max_query_len
        known = not for_capture and common.query_start_loc_cpu is not None
        uniform = known and not self.spec.needs_lse and bool((common.query_lens_cpu == 1).all())
        return 1 if uniform and common.num_actual_tokens == common.num_reqs else 2

    def _key_bound(self, block_table: torch.Tensor | None, max_seq_len: int) -> int:
        if self.kernel.takes_key_bound or block_table is None:
            return max_seq_len
        return block_table.shape[1] * self.spec.block_size

    def _bound_of_capture(self, size: tuple[int, int], bound: int, for_capture: bool) -> int:
        """The bound on sequence lengths of a batch that a graph may replay: that of the capture.

        FlashAttention 3 derives the largest number of splits from the bound, and a schedule for one
        split has another layout than a schedule for several. The captured kernel reads its own.
        """
        bound = max(bound, self._captured_bounds.get(size, 0))
        if for_capture:
            self._captured_bounds[size] = bound
        return bound

    def _running_sum(self, lengths: torch.Tensor) -> torch.Tensor:
        """Cumulative sum of the lengths; with limits at a fixed address, which graphs require."""
        count = lengths.shape[0] + 1
        if self._key_starts is None:
            starts = torch.zeros(count, dtype=torch.int32, device=lengths.device)
        else:
            starts = self._key_starts[:count]
        torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
        return starts

    def _scheduled(self, metadata: FlashAttnMetadata) -> torch.Tensor:
        spec, scheduler = self.spec, self.kernel.scheduler
        assert scheduler is not None  # implied by _aot
        arguments: dict[str, Any] = {
            "batch_size": metadata.num_reqs,
            "max_seqlen_q": metadata.query_bound,
            "max_seqlen_k": metadata.key_bound,
            "num_heads_q": spec.num_heads,
            "num_heads_kv": spec.num_kv_heads,
            # Of latents (M12), FlashAttention 3 takes the rotary part for the keys.
            "headdim": spec.head_size - (spec.head_size_v if spec.use_mla else 0),
            "headdim_v": spec.head_size_v,
            "cache_seqlens": metadata.seq_lens,
            "cu_seqlens_q": metadata.query_start_loc,
            "qkv_dtype": spec.kv_dtype,
            "page_size": spec.block_size,
            "causal": metadata.causal,
            "window_size": spec.visible_window.as_kernel_args(),
            "has_softcap": bool(spec.logits_soft_cap),
            "num_splits": self._num_splits or 0,
        }
        keywords = keywords_of(scheduler)
        schedule: torch.Tensor = scheduler(
            **{name: value for name, value in arguments.items() if keywords.accepts(name)}
        )
        if self._schedule is None or schedule.numel() > self._schedule.numel():
            return schedule
        # One address for the builder's lifetime: captured graphs read it.
        fixed = self._schedule[: schedule.numel()]
        fixed.copy_(schedule, non_blocking=True)
        return fixed


def _check(common: CommonAttentionMetadata) -> None:
    if isinstance(common.causal, torch.Tensor):
        raise ContractError(
            "FlashAttention takes one causal flag per batch, not one per request: "
            "choose triton or torch for mask_kind=per_request"
        )
    if common.query_bias is not None:
        raise ContractError(
            "FlashAttention does not support query_bias: "
            "choose triton or torch for mask_kind=query_bias"
        )
