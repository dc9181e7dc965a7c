"""The builder of batches of divided prefills (X10).

Lengths of prompts are known to the host, which decides what each rank sends, stores and sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.parallel.addresses import TokenPositions, local_slots, table_of
from attnlib.parallel.prefill_checks import checked_prompts
from attnlib.parallel.prefill_keys import StepKeys, all_keys, keys_of_rank, padded, taken
from attnlib.parallel.prefill_metadata import PrefillMetadata, PrefillStep
from attnlib.parallel.prompts import Prompts, Segment
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

    def build(
        self,
        prompt_lens: Sequence[int],
        block_table: Tensor | Sequence[Sequence[int]],
        context_lens: Sequence[int] | None = None,
    ) -> PrefillMetadata:
        """The parts of one batch.

        Args:
            prompt_lens: new tokens of each prompt.
            block_table: the blocks of this rank's local indices (X2), `[R, columns]`, or lists of
                any lengths.
            context_lens: tokens of each prompt that the caches of all ranks hold already; None
                means 0.

        Raises:
            ContractError: on every rank, if one of them cannot build the batch, or prompts differ.
        """
        layer = self._layer

        def attempt() -> tuple[object, PrefillMetadata]:
            table = table_of(block_table).to(self.causal.device)
            lengths = checked_prompts(layer, prompt_lens, context_lens, table)
            prompts = Prompts(layer.spec, layer.division, *lengths)
            return lengths, self._parts(prompts, table)

        return layer.group.agreed(layer.agreement, "prompts", attempt)

    def _parts(self, prompts: Prompts, block_table: Tensor) -> PrefillMetadata:
        layer, device = self._layer, block_table.device
        rank, ranks = layer.group.rank, range(layer.group.world_size)
        new = padded([prompts.tokens(each) for each in ranks])
        held = padded([prompts.context(each) for each in ranks])
        own = prompts.tokens(rank)
        contexts, starts = (
            torch.tensor(each, dtype=torch.int64, device="cpu")
            for each in (prompts.contexts, prompts.starts)
        )
        positions = torch.where(new[..., 0] < 0, -1, taken(contexts, new) + new[..., 1]).int()
        where = TokenPositions(
            new[..., 0].clamp(min=0).flatten().to(device, non_blocking=True),
            positions.flatten().to(device, non_blocking=True),
        )
        size = layer.spec.block_size
        slots = local_slots(layer.division, rank, where, block_table, size)
        is_ring = layer.uses_ring(new.shape[1], held.shape[1])
        if is_ring:
            owners = [(rank - step) % len(ranks) for step in ranks]
            keys = [keys_of_rank(prompts, new, held, rank, owner) for owner in owners]
        else:
            keys = [all_keys(prompts, new, held, rank, size)]
        segments = list(prompts.segments(rank))
        return PrefillMetadata(
            made_for=(layer.spec, layer.division),
            token_rows=(taken(starts, own) + own[:, 1]).to(device),
            positions=positions[rank, : len(own)].to(device),
            num_actual_tokens=len(own),
            num_padded_tokens=new.shape[1],
            is_ring=is_ring,
            steps=[self._step(each, segments, device) for each in keys],
            cache_slots=slots.view(len(ranks), -1),
            context_slots=_context_slots(held[rank].to(device), block_table, size),
            scratch=self._scratch,
        )

    def _step(
        self, keys: StepKeys, segments: Sequence[Segment], device: torch.device
    ) -> PrefillStep:
        size = self._layer.spec.block_size
        num_blocks = int(keys.first_blocks(size)[-1])
        self._scratch.reserve(num_blocks + 1)  # the last one for rows of padding
        metadata = None
        if any(keys.seen):
            table = keys.block_table(segments, size)
            metadata = self._attention(segments, keys.seen, table, keys.is_causal, device)
        return PrefillStep(
            slots=keys.slots(keys.new, size, -1).to(device, non_blocking=True),
            context_slots=keys.slots(keys.context, size, num_blocks * size).to(
                device, non_blocking=True
            ),
            metadata=metadata,
            is_causal=keys.is_causal,
        )

    def _attention(
        self,
        segments: Sequence[Segment],
        seen: list[int],
        table: Tensor,
        is_causal: bool,
        device: torch.device,
    ) -> AttentionMetadata:
        queries = [segment.end - segment.first for segment in segments]
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device="cpu")
        lengths = torch.tensor(seen, dtype=torch.int32, device="cpu")
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


def _context_slots(rows: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """`[rows]` int64, slots in this rank's cache; 0 for padding, which may be anything."""
    if not len(rows):
        return rows[:, 0]
    column = rows[:, 1].clamp(min=0) // block_size
    block = block_table[rows[:, 0].clamp(min=0), column].long()
    return torch.where(rows[:, 0] < 0, 0, block * block_size + rows[:, 1] % block_size)
