"""The builder of batches of divided layers (X3, X4)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.parallel.addresses import TokenPositions, local_slots, token_positions
from attnlib.parallel.checks import check_batch
from attnlib.parallel.graph_tensors import GraphTensors
from attnlib.parallel.merge import KnownMergeRows
from attnlib.parallel.metadata import ParallelMetadata, facts_of
from attnlib.parallel.rows import ROWS_UP_TO, local_rows, row_lengths
from attnlib.parallel.staging import Staging, StagingPlan

if TYPE_CHECKING:
    from attnlib.parallel.attention import ParallelAttention

__all__ = ["ParallelBuilder"]


class ParallelBuilder:
    """Builds the batches of layers with one spec; `ParallelAttention.make_builder` creates it.

    Args:
        layer: one of them.
        cached, context, new: attnlib's builders of its parts.
    """

    def __init__(
        self,
        layer: ParallelAttention,
        cached: AttentionMetadataBuilder[Any],
        context: AttentionMetadataBuilder[Any] | None,
        new: AttentionMetadataBuilder[Any] | None,
    ) -> None:
        self.spec, self.form, self.division = layer.spec, layer.form, layer.division
        self.group, self._agreement, self._exchange = layer.group, layer.agreement, layer.exchange
        self.cached, self.context, self.new = cached, context, new
        self._scratch = Staging(cached.spec, cached.device)
        self._merges = KnownMergeRows(self.group.world_size, self.spec.has_sink)
        self._graphs = GraphTensors()

    @property
    def needs_host_lengths(self) -> bool:
        """Whether a part needs lengths on the host."""
        parts = (self.cached, self.context, self.new)
        return any(part.needs_host_lengths for part in parts if part is not None)

    def build(
        self,
        common: CommonAttentionMetadata,
        *,
        write: bool = True,
        has_context: bool | None = None,
    ) -> ParallelMetadata:
        """The parts of one batch, on the device without a sync.

        Args:
            common: of all ranks: lengths count the keys of all ranks. `block_table_tensor` holds
                the blocks of this rank's local indices (X2); `slot_mapping` is not read.
            write: whether layers write this rank's share of the new keys.
            has_context: whether any request may have context; None finds it in the lengths on the
                host. Equal on all ranks.

        Raises:
            ContractError: on every rank, if one of them cannot build the batch, or the batches
                differ (unless agreements are off: then on this rank).
            RankLostError: see `RankGroup.agree`; without agreements, an exchange by memory of this
                rank did not end.
        """

        def attempt() -> tuple[object, ParallelMetadata]:
            self._exchange.check()
            for name, flag in (("write", write), ("has_context", has_context)):
                if not isinstance(flag, bool) and (flag is not None or name == "write"):
                    form = "True or False" if name == "write" else "True, False or None"
                    raise ContractError(f"{name}={flag!r:.60} must be {form}", rule="X3")
            check_batch(self.spec, self.division, self.group.rank, common)
            facts = {"write": write, "has_context": has_context, **facts_of(common)}
            return (str(self.spec), facts), self._parts(common, write, has_context)

        return self.group.agreed(self._agreement, "batch", attempt)

    def build_for_cudagraph_capture(
        self, common: CommonAttentionMetadata, *, write: bool = True
    ) -> ParallelMetadata:
        """The metadata to capture with. Later batches with as many requests and tokens are copied
        into the same tensors, so that the graph follows them, up to the length that the block table
        holds. A wider table is refused then.

        Raises:
            ContractError: as `build`, or the batch attends to its new tokens separately.
        """
        with self._graphs.capturing():
            found = self.build(common, write=write)
        if found.new is not None:
            raise ContractError(
                f"max_query_len={common.max_query_len}: only decodes and verifications of up to "
                f"{ROWS_UP_TO} tokens per request can be captured",
                rule="X4",
            )
        self._graphs.batches.append(found)
        return found

    def _build(
        self, builder: AttentionMetadataBuilder[Any], batch: CommonAttentionMetadata
    ) -> AttentionMetadata:
        found: AttentionMetadata
        if self._graphs.captures:
            found = builder.build_for_cudagraph_capture(batch)
        else:
            found = builder.build(0, batch)
        return found

    def _parts(
        self, common: CommonAttentionMetadata, write: bool, has_context: bool | None
    ) -> ParallelMetadata:
        rank, tokens = self.group.rank, common.num_actual_tokens
        table = common.block_table_tensor
        assert table is not None
        of_tokens = common.query_start_loc, common.seq_lens, tokens
        where = functools.cache(functools.partial(token_positions, *of_tokens))
        slots = None
        if write and not self.spec.kv_sharing:
            found = local_slots(self.division, rank, where(), table, self.spec.block_size)
            slots = self._graphs.keep("slots", found)
        causal, most = self.spec.is_causal, common.max_query_len
        over_context = self.context is not None and most > (ROWS_UP_TO if causal else 1)
        by_row = self.context is None or self.form.is_decoder or (causal and most > 1)
        cached: AttentionMetadata | None
        new = staging = empty = None
        if over_context and causal:
            cached = self._context(common, has_context)
            new, staging = self._new(common, where())
        elif over_context or not by_row:
            builder = self.context if over_context else self.cached
            cached = self._over_cache(builder, common, common.seq_lens, common.seq_lens_cpu)
        else:
            cached, empty = self._by_row(common, where())
        return ParallelMetadata(
            made_for=(self.spec, self.division),
            num_actual_tokens=tokens,
            cached=cached,
            over_context=over_context,
            empty=empty,
            new=new,
            staging=staging,
            scratch=self._scratch,
            slot_mapping=slots,
            merge_rows=self._merges.of(tokens, table.device, self._graphs.captures),
        )

    def _by_row(
        self, common: CommonAttentionMetadata, where: TokenPositions
    ) -> tuple[AttentionMetadata, Tensor | None]:
        tokens, arguments = common.num_actual_tokens, (self.form, self.division, self.group.rank)
        table = common.block_table_tensor
        assert table is not None
        rows = local_rows(*arguments, where, common.seq_lens, table)
        starts = torch.arange(tokens + 1, dtype=torch.int32, device=table.device)
        score = None if rows.row is None else {"row": self._graphs.keep("row", rows.row)}
        on_host: dict[str, Any] = {}
        if self.cached.needs_host_lengths and table.device.type != "cpu":
            common = self.cached.with_host_lengths(common)
            assert common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None
            host = token_positions(common.query_start_loc_cpu, common.seq_lens_cpu, tokens)
            on_host["seq_lens_cpu"] = row_lengths(*arguments, host, common.seq_lens_cpu)
            counted = torch.arange(tokens + 1, dtype=torch.int32, device="cpu")
            on_host["query_start_loc_cpu"] = counted
        batch = CommonAttentionMetadata(
            query_start_loc=self._graphs.keep("starts", starts),
            seq_lens=self._graphs.keep("row lengths", rows.seq_lens),
            num_reqs=tokens,
            num_actual_tokens=tokens,
            max_query_len=min(1, tokens),
            max_seq_len=self._bound(common, rows.block_table),
            block_table_tensor=self._graphs.keep("table", rows.block_table),
            score_tensors=score,
            is_cross_attention=not self.form.is_decoder,
            **on_host,
        )
        empty = None if rows.empty is None else self._graphs.keep("empty", rows.empty)
        return self._build(self.cached, batch), empty

    def _over_cache(
        self,
        builder: AttentionMetadataBuilder[Any] | None,
        common: CommonAttentionMetadata,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor | None,
    ) -> AttentionMetadata:
        """The queries of a batch over this rank's keys of the first `seq_lens` positions."""
        rank, count, table = self.group.rank, self.division.count, common.block_table_tensor
        assert table is not None
        of, keep = f"of {common.num_actual_tokens} tokens", self._graphs.keep
        batch = CommonAttentionMetadata(
            query_start_loc=keep(f"starts {of}", common.query_start_loc),
            query_start_loc_cpu=common.query_start_loc_cpu,
            seq_lens=keep(f"lengths {of}", count(seq_lens, rank)),
            seq_lens_cpu=None if seq_lens_cpu is None else count(seq_lens_cpu, rank),
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=self._bound(common, table),
            block_table_tensor=keep(f"table {of}", table),
            is_cross_attention=True,
        )
        assert builder is not None
        return self._build(builder, batch)

    def _bound(self, common: CommonAttentionMetadata, table: Tensor) -> int:
        """The most keys of a row; of a graph as many as the table holds."""
        held = table.shape[1] * self.spec.block_size
        return held if self._graphs.captures else min(self.division.bound(common.max_seq_len), held)

    def _context(
        self, common: CommonAttentionMetadata, has_context: bool | None
    ) -> AttentionMetadata | None:
        """The context of prefills; None if the host knows that there is none."""
        starts, lengths = common.query_start_loc_cpu, common.seq_lens_cpu
        on_host = None
        if starts is not None and lengths is not None:
            on_host = (lengths - starts.diff()).clamp(min=0)
            has_context = bool(on_host.any())
        if has_context is False:
            return None
        lengths = common.compute_num_computed_tokens()
        return self._over_cache(self.context, common, lengths, on_host)

    def _new(
        self, common: CommonAttentionMetadata, where: TokenPositions
    ) -> tuple[AttentionMetadata, StagingPlan]:
        size = self.spec.block_size
        staging = StagingPlan.of(common.query_start_loc, where.request, common.max_query_len, size)
        self._scratch.reserve(staging.num_blocks)
        assert self.new is not None
        return self.new.build(0, staging.batch(common)), staging
