"""How the Hopper kernel over latents divides the query rows of a call into blocks and CTAs."""

from __future__ import annotations

from typing import NamedTuple

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.hopper.decode_grid import workers_per_head
from attnlib.ops.triton.hopper.sizes import LATENT_ROWS, latent_blocks, latent_head_blocks

__all__ = ["LatentGrid"]


class LatentGrid(NamedTuple):
    """The grid of a launch.

    Attributes:
        head_blocks: blocks of query heads.
        group: query heads of a block.
        blocks: of query rows of a request.
        rows: query rows of a block.
        ctas: of the grid.
        ranges: of the line of all tiles, if requests have one block of query tokens.
        whole: each block of a request has one CTA, and no request is divided into splits.
    """

    head_blocks: int
    group: int
    blocks: int
    rows: int
    ctas: int
    ranges: int
    whole: bool

    @property
    def token_blocks(self) -> int | None:
        """Blocks of query tokens of a request; None where the kernel does not take them."""
        if self.whole or self.blocks == self.head_blocks:
            return None
        return self.blocks // self.head_blocks

    @classmethod
    def of(
        cls, call: AttentionCall, max_query_len: int, resident: int, is_prefill: bool
    ) -> LatentGrid:
        """The grid of a call.

        Args:
            call: over latents.
            max_query_len: upper bound of the query lengths, in tokens.
            resident: CTAs that may run at a time.
            is_prefill: see `latent_plan.prepare_latent_decode`.
        """
        heads = call.shape.num_heads
        head_blocks, blocks = latent_head_blocks(heads), latent_blocks(heads, max_query_len)
        group = heads // head_blocks
        tokens, ranges = LATENT_ROWS // group, workers_per_head(resident, head_blocks, 1)
        filled = is_prefill and call.num_tokens // tokens * head_blocks >= resident
        if filled or blocks > resident:
            # Each request has at most one incomplete block, and so have the rows after the last.
            ctas = (call.num_tokens // tokens + call.num_reqs + 1) * head_blocks
            return cls(head_blocks, group, blocks, group * tokens, ctas, ranges, True)
        rows = group * min(max_query_len, tokens)
        ctas = workers_per_head(resident, blocks, 1) * blocks
        return cls(head_blocks, group, blocks, rows, ctas, ranges, False)
