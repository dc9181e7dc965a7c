"""The builder of a cascade: which prefixes of a batch are computed once, and its two parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.backends.cascade.batches import decode_items, prefix_batch, suffix_batch
from attnlib.backends.cascade.captured_steps import CapturedSteps
from attnlib.backends.cascade.found_prefixes import prefixes_of
from attnlib.backends.cascade.metadata import CascadeMetadata, covered_tokens, prefix_spec
from attnlib.backends.cascade.schedule import (
    PrefixRule,
    not_shared_reason,
    prefix_parts,
    worthwhile,
)
from attnlib.backends.cascade.warmup import warmup_batch, warmup_sizes
from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.checks import check_batch
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.shared_prefix import (
    SharedPrefix,
)
from attnlib.metadata.strides import refuse_strided
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["CascadeMetadataBuilder"]


class CascadeMetadataBuilder(AttentionMetadataBuilder[CascadeMetadata]):
    """Separates the shared prefixes of each batch; the two backends build their parts.

    Prefixes come from `CommonAttentionMetadata.shared_prefixes`, or else from `common_prefix_len`.
    On a CPU they are also found from the block table. `make_cascade` creates a subclass for each
    pair of backends.
    """

    prefix_backend: ClassVar[type[AttentionBackend]]
    suffix_backend: ClassVar[type[AttentionBackend]]
    rule: ClassVar[PrefixRule]

    def __init__(
        self, spec: AttentionSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(spec, device, **kwargs)
        kwargs.pop("config", None)
        self._suffix = self.suffix_backend.make_builder(spec, device, **kwargs)
        self._prefix: AttentionMetadataBuilder[Any] | None = None
        self._longest_decode = 1
        if not_shared_reason(spec) is None:
            # Without limits: prefixes are not captured, and repeat rows beyond any limit.
            kwargs.pop("limits", None)
            self._prefix = self._prefix_builder(spec, device, kwargs)
        self._shared_decode: tuple[int, int] | None = None
        if self._prefix is not None and self.prefix_backend is self.suffix_backend:
            self._shared_decode = self._suffix.shared_decode_shape
        self._captured: CapturedSteps | None = None
        if self._prefix is not None and self.limits is not None and self.rule.captured_parts:
            self._captured = CapturedSteps(
                spec,
                self.device,
                self.limits,
                self.rule,
                self._suffix,
                self.prefix_backend,
                self._shared_decode,
                kwargs,
            )
        self._num_sms = 0
        if self.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count

    def _prefix_builder(
        self, spec: AttentionSpec, device: torch.device | str | None, settings: dict[str, Any]
    ) -> AttentionMetadataBuilder[Any]:
        """The builder of the prefix backend, for decodes as long as its kernels take."""
        builder_cls = self.prefix_backend.get_builder_cls()
        fitting = max(1, self.rule.max_decode_rows // spec.group_size)
        self._longest_decode = min(builder_cls.max_decode_query_len(spec), fitting)
        config = dict(self.prefix_backend.config)
        if self._longest_decode > (builder_cls.reorder_batch_threshold or 1):
            config["decode_query_len"] = self._longest_decode
        return builder_cls(prefix_spec(spec), device, config=config, **settings)

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """See `AttentionMetadataBuilder.reorder_batch`; the suffix backend decides."""
        return self._suffix.reorder_batch(input_batch, scheduler_output)

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        num_sms: int,
    ) -> bool:
        """Whether a prefix that all requests share is computed once."""
        end = common_prefix_len // self.spec.block_size * self.spec.block_size
        if self._prefix is None or len(query_lens) < 2 or end == 0:
            return False
        everyone = SharedPrefix(tuple(range(len(query_lens))), 0, end)
        one_kernel = self._shared_decode is not None and max(query_lens) <= 1
        least = self.rule.least(int(sum(query_lens)), one_kernel)
        return bool(worthwhile([everyone], self.spec, least))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CascadeMetadata:
        """The metadata of both parts.

        Args:
            common_prefix_len: leading tokens that all requests share. Read only if the batch does
                not state its shared prefixes.
            common_attn_metadata, fast_build: see `AttentionMetadataBuilder.build`.

        Raises:
            ContractError: shared prefixes that the batch cannot have.
        """
        common = common_attn_metadata
        check_batch(common, self.spec, needs_host_lengths=self.needs_host_lengths)
        chosen = self._choose(common_prefix_len, common)
        if self._captured is not None:
            if self._captured.holds_items(common):
                common = self.with_host_lengths(common)
            if (captured := self._captured.build(chosen, common)) is not None:
                return captured
        if not chosen:
            return CascadeMetadata.of(
                common, self._suffix.build(common_prefix_len, common, fast_build)
            )
        shape = self._decode_shape(common)
        if shape is not None:
            return self._build_items(chosen, common, fast_build, shape)
        return self._build_shared(chosen, common, fast_build)

    def _build_items(
        self,
        chosen: Sequence[SharedPrefix],
        common: CommonAttentionMetadata,
        fast_build: bool,
        shape: tuple[int, int],
    ) -> CascadeMetadata:
        """The metadata of a decode whose prefixes and suffixes one kernel computes."""
        items = decode_items(common, chosen, self.spec, shape)
        suffix = self._suffix.build(0, common.replace(shared_prefixes=None), fast_build)
        return CascadeMetadata.of(common, suffix, tuple(chosen), items=items)

    def _build_shared(
        self, chosen: Sequence[SharedPrefix], common: CommonAttentionMetadata, fast_build: bool
    ) -> CascadeMetadata:
        """The metadata of both parts of a batch with shared prefixes."""
        query_lens = common.query_lens_cpu.tolist()
        covered = covered_tokens(chosen, common.num_reqs)
        parts = prefix_parts(
            chosen, query_lens, self.spec, self._num_sms, self.rule, self._longest_decode
        )
        suffix = self._suffix.build(0, suffix_batch(common, covered, self.spec), fast_build)
        assert self._prefix is not None  # prefixes were chosen
        prefixes = prefix_batch(common, parts, self._prefix)
        return CascadeMetadata.of(common, suffix, tuple(chosen), prefixes)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> CascadeMetadata:
        """The metadata to capture a CUDA graph with.

        Without `PrefixRule.captured_parts` no prefix is shared, because a graph would repeat the
        prefixes of the captured batch. With it, the graph shares the prefixes of each later batch
        that `build` gets in the same tensors, as far as they fit that number of parts.

        Raises:
            ContractError: the batch has strided metadata.
        """
        refuse_strided(common_attn_metadata)
        if self._captured is not None:
            is_decode = self._decode_shape(common_attn_metadata) is not None
            found = self._captured.capture(common_attn_metadata, is_decode)
            if found is not None:
                return found
        suffix = self._suffix.build_for_cudagraph_capture(common_attn_metadata)
        return CascadeMetadata.of(common_attn_metadata, suffix)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> CascadeMetadata:
        """The metadata of one draft step; no prefix is shared."""
        suffix = self._suffix.build_for_drafting(common_attn_metadata, draft_index)
        return CascadeMetadata.of(common_attn_metadata, suffix)

    def seq_len_bounds(self, num_reqs: int, least: int, most: int) -> list[int]:
        """The bounds of the suffix backend."""
        return self._suffix.seq_len_bounds(num_reqs, least, most)

    def warmup_lengths(self, limits: BatchLimits) -> list[tuple[int, ...]]:
        """The batches of the suffix backend."""
        return self._suffix.warmup_lengths(limits)

    def warmup_metadata(self, limits: BatchLimits) -> Iterator[tuple[CascadeMetadata, int]]:
        """Batches with one shared prefix: every class of query rows, of prefix lengths, and of
        suffix lengths, whose kernels return log-sum-exps only here. `rule` does not count."""
        if self._prefix is None:
            return
        one_kernel = self._shared_decode is not None
        for sizes in warmup_sizes(limits, self._prefix, self._suffix, one_kernel):
            batch, everyone = warmup_batch(self.spec, self.device, *sizes)
            shape = self._decode_shape(batch)
            if shape is None:
                yield self._build_shared([everyone], batch, False), batch.num_actual_tokens
            else:
                yield self._build_items([everyone], batch, False, shape), batch.num_actual_tokens

    def update_block_table(
        self, metadata: CascadeMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CascadeMetadata:
        """The same batch with other blocks.

        Raises:
            ContractError: the batch has shared prefixes, which other blocks need not share.
        """
        if metadata.shared_prefixes:
            raise ContractError(
                "update_block_table of a batch with shared prefixes: the other blocks may share "
                "other prefixes; build the batch again"
            )
        updated = super().update_block_table(metadata, block_table, slot_mapping)
        updated.suffix = self._suffix.update_block_table(metadata.suffix, block_table, slot_mapping)
        return updated

    def _choose(
        self, common_prefix_len: int, common: CommonAttentionMetadata
    ) -> list[SharedPrefix]:
        """The prefixes of a batch that are computed once."""
        if self._prefix is None:
            return []
        found = prefixes_of(common, common_prefix_len, self.spec.block_size)
        one_kernel = self._decode_shape(common) is not None
        least = self.rule.least(common.num_actual_tokens, one_kernel)
        return worthwhile(found, self.spec, least)

    def _decode_shape(self, common: CommonAttentionMetadata) -> tuple[int, int] | None:
        """How a decode is divided that one kernel computes; None for other batches."""
        if common.max_query_len > 1 or common.query_bias is not None:
            return None
        return self._shared_decode
