"""Lists of selected keys for the conformance suite, and the keys that they select (M11).

The lists contain what backends must handle: entries in any order, padding at any place, entries
past the end of the request, blocks after the query, short lists and empty ones. The masks for the
oracle are computed entry by entry, and share no code with a backend.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from attnlib.testing.batch_spec import BatchSpec

__all__ = ["KeyLists", "make_lists", "selected_masks", "selection_of"]


def selection_of(fields: tuple[str, int, int, int] | None) -> KeySelection | None:
    """The key selection of a case: (scope, block_size, max_blocks, query_block_size)."""
    if fields is None:
        return None
    scope, block_size, max_blocks, query_block_size = fields
    return KeySelection(
        scope=scope,  # type: ignore[arg-type]  # the constructor converts the name
        block_size=block_size,
        max_blocks=max_blocks,
        query_block_size=query_block_size,
    )


@dataclass(frozen=True)
class KeyLists:
    """The lists of a batch, on the CPU.

    Attributes:
        indices: [L, H, K] int32.
        list_start_loc: [R + 1] int32, or None.
    """

    indices: torch.Tensor
    list_start_loc: torch.Tensor | None

    def to(self, device: torch.device | str) -> SelectedKeys:
        """The argument of a layer call. The rows of the lists are views of a wider tensor."""
        indices = torch.full((*self.indices.shape[:2], self.indices.shape[2] + 3), -1)
        indices = indices.to(torch.int32)
        indices[..., : self.indices.shape[2]] = self.indices
        starts = self.list_start_loc
        return SelectedKeys(
            indices.to(device)[..., : self.indices.shape[2]],
            None if starts is None else starts.to(device),
        )


def make_lists(
    selection: KeySelection,
    batch: BatchSpec,
    num_heads: int,
    num_kv_heads: int,
    seed: int,
    everything: bool = False,
) -> KeyLists:
    """Random lists for a batch.

    Args:
        selection: the form of the lists.
        batch: the request lengths.
        num_heads, num_kv_heads: Hq and Hkv.
        seed: seed of the random numbers.
        everything: every list selects all blocks of its request, in random order.
    """
    rng = random.Random(seed)
    heads = {"all_heads": 1, "kv_head": num_kv_heads, "query_head": num_heads}[selection.scope]
    size, shared, longest = selection.block_size, selection.query_block_size, selection.max_blocks
    lists: list[list[list[int]]] = []
    starts = [0]
    for query_len, seq_len in batch.lengths:
        num_blocks = -(-seq_len // size)
        for begin in range(0, query_len, shared):
            last = max(seq_len - query_len + min(begin + shared, query_len) - 1, 0)
            per_head = []
            for _ in range(heads):
                entries = list(range(num_blocks))
                rng.shuffle(entries)
                if not everything:
                    own = last // size
                    if own in entries:  # a model always selects the block of the query
                        entries.remove(own)
                        entries.insert(0, own)
                    wanted = rng.choice([longest, longest, max(longest - 1, 1)])
                    entries = entries[:wanted] if rng.random() > 0.1 else []
                    if len(entries) < longest and rng.random() < 0.5:
                        entries.append(num_blocks + rng.randrange(1 << 20))
                entries += [-1 - rng.randrange(3)] * (longest - len(entries))
                rng.shuffle(entries)
                per_head.append(entries)
            lists.append(per_head)
        starts.append(len(lists))
    shape = (len(lists), heads, longest)
    indices = torch.tensor(lists, dtype=torch.int32).view(shape)
    return KeyLists(indices, torch.tensor(starts, dtype=torch.int32) if shared > 1 else None)


def selected_masks(
    lists: KeyLists, selection: KeySelection, batch: BatchSpec, num_heads: int
) -> tuple[torch.Tensor, ...]:
    """The selected keys of each request, [Hq, query_len, seq_len] bool, before causality."""
    heads = lists.indices.shape[1]
    masks, first = [], 0
    for query_len, seq_len in batch.lengths:
        mask = torch.zeros(num_heads, query_len, seq_len, dtype=torch.bool)
        for i in range(query_len):
            own = lists.indices[first + i // selection.query_block_size].tolist()
            for head in range(num_heads):
                for entry in own[head * heads // num_heads]:
                    if entry >= 0:
                        begin = entry * selection.block_size
                        mask[head, i, begin : begin + selection.block_size] = True
        masks.append(mask)
        first += -(-query_len // selection.query_block_size)
    return tuple(masks)
