"""Metadata of a cascade: prefixes that several requests share, and the rest of each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.backends.cascade.batches import PrefixBatch, prefix_batch, suffix_batch
from attnlib.backends.cascade.captured import CapturedPrefixes, fitting_parts
from attnlib.backends.cascade.captured_items import CapturedItems
from attnlib.backends.cascade.schedule import (
    PrefixRule,
    decode_segments,
    not_shared_reason,
    prefix_parts,
    worthwhile,
)
from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.checks import check_batch
from attnlib.metadata.common import CommonAttentionMetadata, refuse_strided
from attnlib.metadata.shared_prefix import (
    SharedPrefix,
    check_shared_prefixes,
    find_shared_prefixes,
)
from attnlib.ops.shared_decode import DecodeItems, schedule_items
from attnlib.spec import AttentionSpec, CudaGraphSupport, MaskKind
from attnlib.workspace import BatchLimits

__all__ = ["CascadeMetadata", "CascadeMetadataBuilder", "prefix_spec"]


@dataclass(kw_only=True)
class CascadeMetadata(AttentionMetadata):
    """One batch, whose shared prefixes are computed once.

    Attributes:
        num_actual_tokens: T.
        query_start_loc: `[R + 1]` int32 device, of the whole batch, for validation and recording.
        seq_lens: `[R]` int32 device, likewise.
        block_table: `[R, max_blocks]` int32 device, likewise, or None.
        shared_prefixes: the prefixes that are computed once; empty if there are none.
        suffix: the suffix backend's metadata: of each request without its shared prefixes; with
            `items` of whole requests, for tensors that the kernel of the items cannot read.
        prefix: the shared prefixes, or None if there are none.
        items: prefixes and suffixes as items of one kernel, or None.
    """

    fixed_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "num_actual_tokens",
            "num_decode_tokens",
            "num_prefills",
            "num_prefill_tokens",
            "query_start_loc",
            "seq_lens",
            "block_table",
            "shared_prefixes",
        }
    )

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    shared_prefixes: tuple[SharedPrefix, ...]
    suffix: Any
    prefix: PrefixBatch | None
    items: DecodeItems | None = None


def prefix_spec(spec: AttentionSpec) -> AttentionSpec:
    """The requirements on the prefix backend: every key of a prefix is visible to every query, and
    the sink belongs to the suffix."""
    return spec.replace(mask_kind=MaskKind.BIDIRECTIONAL, has_sink=False)


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
            builder_cls = self.prefix_backend.get_builder_cls()
            fitting = max(1, self.rule.max_decode_rows // spec.group_size)
            self._longest_decode = min(builder_cls.max_decode_query_len(spec), fitting)
            config = dict(self.prefix_backend.config)
            if self._longest_decode > (builder_cls.reorder_batch_threshold or 1):
                config["decode_query_len"] = self._longest_decode
            self._prefix = builder_cls(prefix_spec(spec), device, config=config, **kwargs)
        self._shared_decode: tuple[int, int] | None = None
        if self._prefix is not None and self.prefix_backend is self.suffix_backend:
            self._shared_decode = self._suffix.shared_decode_shape
        self._captured: CapturedPrefixes | None = None
        if self._prefix is not None and self.limits is not None and self.rule.captured_parts:
            builder_cls = self.prefix_backend.get_builder_cls()
            if builder_cls.cudagraph_support is CudaGraphSupport.ALWAYS:
                self._captured = CapturedPrefixes(spec, self.device, self.limits, self.rule)
                self._captured_prefix = builder_cls(
                    prefix_spec(spec), device, config=self.prefix_backend.config,
                    limits=self._captured.limits, **kwargs,
                )  # fmt: skip
        self._captured_items: CapturedItems | None = None
        if self._shared_decode is not None and self.limits and self.rule.captured_parts:
            self._captured_items = CapturedItems(
                spec, self.device, self.limits, self.rule, self._shared_decode
            )
        self._num_sms = 0
        if self.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count

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
            common_attn_metadata: the batch.
            fast_build: as in `AttentionMetadataBuilder.build`.

        Raises:
            ContractError: shared prefixes that the batch cannot have.
        """
        common = common_attn_metadata
        check_batch(common, self.spec, needs_host_lengths=self.needs_host_lengths)
        chosen = self._choose(common_prefix_len, common)
        captured = None
        if self._captured is not None and self._captured.holds(common):
            captured = self._build_captured(chosen, common)
        if self._captured_items is not None and self._captured_items.holds(common):
            common = self.with_host_lengths(common)
            if int(common.query_lens_cpu.max()) <= 1:
                captured = self._build_captured_items(self._captured_items, chosen, common)
        if captured is not None:
            return captured
        if not chosen:
            return self._metadata(common, self._suffix.build(common_prefix_len, common, fast_build))
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
        assert common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None
        starts = common.query_start_loc_cpu.tolist()
        segments = decode_segments(chosen, starts, common.seq_lens_cpu.tolist(), self.spec)
        lists = schedule_items(
            segments, starts[-1], self.spec.group_size, self.spec.block_size, *shape
        )
        suffix = self._suffix.build(0, common.replace(shared_prefixes=None), fast_build)
        scheduled = lists.to_device(common.query_start_loc.device)
        return self._metadata(common, suffix, tuple(chosen), items=scheduled)

    def _build_shared(
        self, chosen: Sequence[SharedPrefix], common: CommonAttentionMetadata, fast_build: bool
    ) -> CascadeMetadata:
        """The metadata of both parts of a batch with shared prefixes."""
        query_lens, covered = common.query_lens_cpu.tolist(), [0] * common.num_reqs
        for prefix in chosen:
            for request in prefix.requests:
                covered[request] = prefix.end
        parts = prefix_parts(
            chosen, query_lens, self.spec, self._num_sms, self.rule, self._longest_decode
        )
        suffix = self._suffix.build(0, suffix_batch(common, covered, self.spec), fast_build)
        assert self._prefix is not None  # prefixes were chosen
        prefixes = prefix_batch(common, parts, query_lens, self._prefix)
        return self._metadata(common, suffix, tuple(chosen), prefixes)

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
        common = common_attn_metadata
        on_host = common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None
        if self._captured_items is not None and on_host and self._decode_shape(common):
            self._captured_items.add_source(common)
            return self._build_captured_items(self._captured_items, [], common)
        if self._captured is not None:
            self._captured.add_source(common_attn_metadata)
            return self._build_captured([], common_attn_metadata)
        suffix = self._suffix.build_for_cudagraph_capture(common_attn_metadata)
        return self._metadata(common_attn_metadata, suffix)

    def _build_captured(
        self, chosen: Sequence[SharedPrefix], common: CommonAttentionMetadata
    ) -> CascadeMetadata:
        """The metadata of a batch in the tensors of a graph, whose launches it has."""
        captured = self._captured
        assert captured is not None
        query_lens = [0] * common.num_reqs
        if common.query_start_loc_cpu is not None:
            query_lens = common.query_lens_cpu.tolist()
        kept, parts = fitting_parts(
            chosen, query_lens, captured.max_parts, captured.max_rows(common.num_actual_tokens),
            self.rule, self.spec.block_size,
        )  # fmt: skip
        covered = [0] * common.num_reqs
        for prefix in kept:
            for request in prefix.requests:
                covered[request] = prefix.end
        suffix, batch, (rows, starts, partial_rows) = captured.fill(
            common, covered, parts, query_lens
        )
        found = PrefixBatch(
            metadata=self._captured_prefix.build_for_cudagraph_capture(batch),
            query_rows=rows,
            num_rows=batch.num_actual_tokens,
            partial_starts=starts,
            partial_rows=partial_rows,
        )
        own = self._suffix.build_for_cudagraph_capture(suffix)
        return self._metadata(common, own, tuple(kept), found)

    def _build_captured_items(
        self,
        captured: CapturedItems,
        chosen: Sequence[SharedPrefix],
        common: CommonAttentionMetadata,
    ) -> CascadeMetadata:
        """The metadata of a decode in the tensors of a graph, whose launches it has."""
        kept, items = captured.fill(chosen, common)
        suffix = self._suffix.build_for_cudagraph_capture(common.replace(shared_prefixes=None))
        return self._metadata(common, suffix, tuple(kept), items=items)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> CascadeMetadata:
        """The metadata of one draft step; no prefix is shared."""
        suffix = self._suffix.build_for_drafting(common_attn_metadata, draft_index)
        return self._metadata(common_attn_metadata, suffix)

    def seq_len_bounds(self, num_reqs: int, least: int, most: int) -> list[int]:
        """The bounds of the suffix backend."""
        return self._suffix.seq_len_bounds(num_reqs, least, most)

    def warmup_metadata(self, limits: BatchLimits) -> Iterator[tuple[CascadeMetadata, int]]:
        """Batches with one shared prefix: every class of query rows, of prefix lengths, and of
        suffix lengths, whose kernels return log-sum-exps only here. `rule` does not count."""
        if self._prefix is None:
            return
        block, most = self.spec.block_size, limits.max_num_tokens
        powers = [1 << n for n in range(1, limits.max_num_reqs.bit_length())]
        counts = sorted({*powers, limits.max_num_reqs} - {1})
        longest_decode = min(self._suffix.reorder_batch_threshold or 1, most // 2)
        shapes = [
            (count, query_len)
            for query_len in range(1, longest_decode + 1)
            for count in counts
            if count * query_len <= most
        ]
        if shapes and most // 2 > longest_decode:
            shapes.append((2, most // 2))
        for count, query_len in shapes:
            longest = (limits.max_seq_len - query_len) // block * block
            if longest < block:
                continue
            if self._shared_decode is not None and query_len == 1:
                batch, everyone = self._warmup_batch(count, 1, block, 1)
                yield self._build_items([everyone], batch, False, self._shared_decode), count
                continue
            bounds = self._prefix.seq_len_bounds(1, block, longest)
            prefixes = {min(longest, -(-bound // block) * block) for bound in bounds}
            sizes = [(prefix_len, query_len) for prefix_len in sorted(prefixes)]
            most_own = limits.max_seq_len - block
            sizes += [
                (block, own) for own in self._suffix.seq_len_bounds(count, query_len, most_own)
            ]
            for prefix_len, own in dict.fromkeys(sizes):
                batch, everyone = self._warmup_batch(count, query_len, prefix_len, own)
                yield self._build_shared([everyone], batch, False), count * query_len

    def _warmup_batch(
        self, num_reqs: int, query_len: int, prefix_len: int, own: int
    ) -> tuple[CommonAttentionMetadata, SharedPrefix]:
        """Requests with one prefix, whose tokens are all in block 0, and the prefix. They declare
        up to `own` other tokens."""
        seq_len = prefix_len + query_len
        columns = -(-(prefix_len + own) // self.spec.block_size)
        common = CommonAttentionMetadata.from_lengths(
            [query_len] * num_reqs, [seq_len] * num_reqs,
            torch.zeros(num_reqs, columns, dtype=torch.int32), self.spec.block_size, self.device,
            max_seq_len=prefix_len + own,
        )  # fmt: skip
        assert common.slot_mapping is not None  # a block table was given
        common.slot_mapping.fill_(-1)
        return common, SharedPrefix(tuple(range(num_reqs)), 0, prefix_len)

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
        if (
            self._prefix is None
            or common.num_reqs < 2
            or common.is_cross_attention
            or common.query_start_loc_cpu is None
            or common.seq_lens_cpu is None
            or common.block_table_tensor is None
        ):
            return []
        context = common.seq_lens_cpu - common.query_lens_cpu
        block_size, found = self.spec.block_size, common.shared_prefixes
        if found is not None:
            check_shared_prefixes(found, context.tolist(), block_size)
        elif common.block_table_tensor.device.type == "cpu":
            found = find_shared_prefixes(common.block_table_tensor, context, block_size)
        elif common_prefix_len:
            end = min(common_prefix_len, int(context.min())) // block_size * block_size
            found = [SharedPrefix(tuple(range(common.num_reqs)), 0, end)] if end else []
        one_kernel = self._decode_shape(common) is not None
        least = self.rule.least(common.num_actual_tokens, one_kernel)
        return worthwhile(found or [], self.spec, least)

    def _decode_shape(self, common: CommonAttentionMetadata) -> tuple[int, int] | None:
        """How a decode is divided that one kernel computes; None for other batches."""
        if common.max_query_len > 1 or common.query_bias is not None:
            return None
        return self._shared_decode

    def _metadata(
        self,
        common: CommonAttentionMetadata,
        suffix: Any,
        chosen: tuple[SharedPrefix, ...] = (),
        prefix: PrefixBatch | None = None,
        items: DecodeItems | None = None,
    ) -> CascadeMetadata:
        return CascadeMetadata(
            num_prefills=suffix.num_prefills,
            num_prefill_tokens=suffix.num_prefill_tokens,
            num_decode_tokens=suffix.num_decode_tokens,
            slot_mapping=None if common.slot_mapping is None else common.slot_mapping.contiguous(),
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            shared_prefixes=chosen,
            suffix=suffix,
            prefix=prefix,
            items=items,
        )
