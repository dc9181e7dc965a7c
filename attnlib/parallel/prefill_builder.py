"""The builder of batches of divided prefills (X10).

Lengths of prompts are known to the host, which decides what each rank sends, stores and sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.parallel.addresses import TokenPositions, local_slots
from attnlib.parallel.prefill_metadata import PrefillMetadata, PrefillStep
from attnlib.parallel.prompts import Prompts, Segment, visible_keys
from attnlib.parallel.staging import Staging

if TYPE_CHECKING:
    from attnlib.parallel.prefill import ParallelPrefill

__all__ = ["PrefillBuilder"]


class PrefillBuilder:
    """Builds batches of prompts; `ParallelPrefill.make_builder` creates it.

    Args:
        layer: one of those that use the batches.
        causal, cross: attnlib's builders for keys that end with the queries, and for others.
    """

    def __init__(
        self,
        layer: ParallelPrefill,
        causal: AttentionMetadataBuilder[Any],
        cross: AttentionMetadataBuilder[Any] | None,
    ) -> None:
        self._layer, self.causal, self.cross = layer, causal, cross
        self._scratch = Staging(layer.causal.spec, causal.device)

    def build(self, prompt_lens: Sequence[int], block_table: Tensor) -> PrefillMetadata:
        """The parts of one batch.

        Args:
            prompt_lens: tokens of each prompt; none of them is in the cache.
            block_table: `[R, columns]` int32, the blocks of this rank's local indices (X2).

        Raises:
            ContractError: on every rank, if one of them cannot build the batch, or prompts differ.
        """
        layer, error = self._layer, None
        rows, lengths = block_table.shape[0], [int(length) for length in prompt_lens]
        division, block_size = layer.division, layer.spec.block_size
        needed = division.bound(max(lengths, default=0))
        if min(lengths, default=0) < 0 or rows != len(lengths):
            error = ContractError(
                f"{len(lengths)} prompts of {lengths} tokens with {rows} rows of the block table: "
                "pass one row for each, and lengths of at least 0",
                rule="X10",
            )
        elif needed > block_table.shape[1] * block_size:
            error = ContractError(
                f"block_table has {block_table.shape[1]} columns, but a rank holds {needed} keys "
                f"of a prompt: it needs {-(-needed // block_size)}",
                rule="X2",
            )
        layer.agree(("prompts", lengths), error)
        return self._parts(Prompts(lengths, layer.group.world_size), block_table)

    def _parts(self, prompts: Prompts, block_table: Tensor) -> PrefillMetadata:
        layer, device = self._layer, block_table.device
        rank, world_size = layer.group.rank, layer.group.world_size
        tokens = [prompts.tokens(each) for each in range(world_size)]
        most = max(map(len, tokens))
        is_ring = layer.uses_ring(most)
        pairs = torch.full((world_size, most, 2), -1, dtype=torch.int64)
        for each, found in enumerate(tokens):
            if found:
                pairs[each, : len(found)] = torch.tensor(found)
        own = pairs[rank, : len(tokens[rank])]
        starts = torch.tensor(prompts.starts[:-1] or [0])
        where = pairs.to(device, non_blocking=True).view(-1, 2)
        found_at = TokenPositions(where[:, 0].clamp(min=0), where[:, 1].int())
        spec = layer.spec
        slots = local_slots(layer.division, rank, found_at, block_table, spec.block_size)
        owners = [(rank - step) % world_size for step in range(world_size)]
        steps = (
            [self._ring_step(prompts, pairs[owner], owner, device) for owner in owners]
            if is_ring
            else [self._whole(prompts, pairs.view(-1, 2), device)]
        )
        return PrefillMetadata(
            token_rows=(starts[own[:, 0]] + own[:, 1]).to(device),
            positions=own[:, 1].int().to(device),
            num_actual_tokens=len(own),
            num_padded_tokens=most,
            is_ring=is_ring,
            steps=steps,
            cache_slots=slots.view(world_size, most),
            scratch=self._scratch,
        )

    def _whole(self, prompts: Prompts, pairs: Tensor, device: torch.device) -> PrefillStep:
        """All keys: the segments of this rank see the prompt up to their ends."""
        segments = list(prompts.segments(self._layer.group.rank))
        seen = [segment.end for segment in segments]
        return self._step(prompts.lengths, pairs, pairs[:, 1], segments, seen, True, device)

    def _ring_step(
        self, prompts: Prompts, pairs: Tensor, owner: int, device: torch.device
    ) -> PrefillStep:
        rank = self._layer.group.rank
        segments = list(prompts.segments(rank))
        seen = [visible_keys(prompts.divisions[s.request], s, owner, rank) for s in segments]
        local = torch.tensor(
            [prompts.divisions[r].local(p) if r >= 0 else 0 for r, p in pairs.tolist()],
            dtype=torch.int64,
        )
        lengths = prompts.held(owner)
        return self._step(lengths, pairs, local, segments, seen, owner == rank, device)

    def _step(
        self,
        lengths: list[int],
        pairs: Tensor,
        index: Tensor,
        segments: list[Segment],
        seen: list[int],
        is_causal: bool,
        device: torch.device,
    ) -> PrefillStep:
        """One step: sequences of `lengths` in the scratch cache, of which row i of the received
        keys is element `index[i]` of sequence `pairs[i, 0]`, and each segment sees a beginning."""
        size = self._layer.spec.block_size
        blocks = [-(-length // size) for length in lengths]
        first = torch.tensor([0, *accumulate(blocks)])
        self._scratch.reserve(max(1, int(first[-1])))
        request = pairs[:, 0].clamp(min=0)
        slots = torch.where(pairs[:, 0] < 0, -1, first[request] * size + index)
        metadata = None
        if any(seen):
            table = first[:-1, None] + torch.arange(max(1, *blocks))
            table = table.clamp(max=int(first[-1]) - 1)[[s.request for s in segments]]
            metadata = self._attention(segments, seen, table.int(), is_causal, device)
        return PrefillStep(slots.to(device, non_blocking=True), metadata, is_causal)

    def _attention(
        self,
        segments: list[Segment],
        seen: list[int],
        table: Tensor,
        is_causal: bool,
        device: torch.device,
    ) -> AttentionMetadata:
        queries = [segment.end - segment.first for segment in segments]
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        lengths = torch.tensor(seen, dtype=torch.int32)
        batch = CommonAttentionMetadata(
            query_start_loc=starts.to(device, non_blocking=True),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(device, non_blocking=True),
            seq_lens_cpu=lengths,
            num_reqs=len(segments),
            num_actual_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=max(seen),
            block_table_tensor=table.to(device, non_blocking=True),
            is_cross_attention=not is_causal,
        )
        builder = self.causal if is_causal else self.cross
        assert builder is not None
        found: AttentionMetadata = builder.build(0, batch)
        return found
