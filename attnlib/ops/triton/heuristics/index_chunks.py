"""How the scores of the key indexer (M14) are divided over launches and programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import triton

from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.sparse.key_selection import KeySelection

__all__ = ["MAX_GRID", "IndexChunks"]

_MAX_SCORES = 1 << 26
"""Most scores in the workspace: 256 MiB. A batch with more is computed in chunks of queries; a
chunk has at least one query token, whose scores are the lists of a token times the blocks of
`max_seq_len`."""
_MAX_TILE_TOKENS = 16
_TILE_KEYS = 128
MAX_GRID = 65535
"""Most programs along the second axis of a grid."""


class IndexChunks(NamedTuple):
    """How the scores of a batch are divided over launches and programs.

    Attributes:
        columns: blocks of keys of the longest request.
        scores_of_token: lists of a token times `columns`.
        tile_tokens: query tokens of a tile.
        all_tiles, tiles: tiles of query tokens, and those of one launch.
        blocks, key_tiles: blocks of keys of a program, and programs for `columns`.
    """

    columns: int
    scores_of_token: int
    tile_tokens: int
    all_tiles: int
    tiles: int
    blocks: int
    key_tiles: int

    @property
    def scores(self) -> int:
        """Scores of one launch."""
        return self.tiles * self.tile_tokens * self.scores_of_token

    def launches(self) -> Iterator[tuple[int, int]]:
        """The first tile of query tokens and the number of tiles of each launch."""
        for first in range(0, self.all_tiles, self.tiles):
            yield first, min(self.tiles, self.all_tiles - first)

    @classmethod
    def of(
        cls,
        num_tokens: int,
        num_reqs: int,
        num_lists: int,
        selection: KeySelection,
        max_query_len: int,
        max_seq_len: int,
    ) -> IndexChunks:
        """Divide the scores of a batch.

        Args:
            num_tokens: query tokens.
            num_reqs: requests.
            num_lists: lists of each token.
            selection: size of the blocks of keys.
            max_query_len, max_seq_len: upper bounds of the query and the sequence lengths.

        Raises:
            ContractError: a bound of the lengths that needs more programs than a grid has.
        """
        columns = max(1, triton.cdiv(max_seq_len, selection.block_size))
        scores_of_token = num_lists * columns
        tile_tokens = _tokens_of_tile(scores_of_token, max_query_len)
        all_tiles = num_tokens // tile_tokens + num_reqs + 1
        blocks = max(1, _TILE_KEYS // next_power_of_2(selection.block_size))
        key_tiles = triton.cdiv(columns, blocks)
        if key_tiles > MAX_GRID:
            raise ContractError(
                f"max_seq_len={max_seq_len} needs {key_tiles} tiles of {blocks} blocks; the "
                f"kernels take at most {MAX_GRID}: pass a smaller bound",
                rule="M14",
            )
        tiles = max(1, min(all_tiles, _MAX_SCORES // (tile_tokens * scores_of_token)))
        return cls(columns, scores_of_token, tile_tokens, all_tiles, tiles, blocks, key_tiles)


def _tokens_of_tile(scores_of_token: int, max_query_len: int) -> int:
    """Query tokens of a tile, a power of two: at most those whose scores fit the workspace."""
    fitting = max(1, _MAX_SCORES // scores_of_token)
    return min(
        _MAX_TILE_TOKENS,
        next_power_of_2(max(1, max_query_len)),
        1 << (fitting.bit_length() - 1),
    )
