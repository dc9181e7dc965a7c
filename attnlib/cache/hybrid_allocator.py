"""Blocks of requests in a pool that several layer groups share.

Each request has one row of blocks per group. Blocks that no later query sees, because they lie
behind the window of their group, go back to the pool while the request runs; the null block takes
their place (P12). A group with a window of W tokens therefore holds a bounded number of blocks for
each request, however long it grows. State layers have one block per layer (`hybrid_states.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import lcm

from attnlib.cache.allocator import BlockAllocator
from attnlib.cache.hybrid_forks import fork_sequence
from attnlib.cache.hybrid_groups import Group, KVCacheGroup, StateGroup, check_groups
from attnlib.cache.hybrid_moves import SequenceMoves
from attnlib.cache.hybrid_prefixes import longest_prefix
from attnlib.cache.hybrid_states import LayerSlots, StateBlocks
from attnlib.cache.prefix_tree import TokenIds, as_tokens, token_count
from attnlib.cache.sequence_blocks import NULL_BLOCK, SequenceBlocks, as_sequence, known_group
from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count

__all__ = ["NULL_BLOCK", "HybridBlockAllocator", "SequenceBlocks"]


class HybridBlockAllocator(SequenceMoves):
    """Allocates the blocks of a `HybridKVCache`. Every method succeeds or changes nothing.

    Args:
        groups: as in `HybridKVCache`.
        num_blocks: blocks of the pool, the null block included.
        prefix_caching: keep full blocks findable by content; see `BlockAllocator`.

    Raises:
        ContractError: there is no group, or fewer than two blocks.
    """

    def __init__(
        self, groups: Mapping[str, Group], num_blocks: int, *, prefix_caching: bool = True
    ) -> None:
        check_groups(groups)
        if not groups:
            raise ContractError("an allocator needs at least one group of layers")
        self.groups = {n: each for n, each in groups.items() if isinstance(each, KVCacheGroup)}
        smallest = min((group.block_size for group in self.groups.values()), default=1)
        self.pool = BlockAllocator(
            num_blocks, smallest, prefix_caching=prefix_caching, reserve_null_block=True
        )
        states = {n: each for n, each in groups.items() if isinstance(each, StateGroup)}
        self._states = StateBlocks(self.pool, states)
        self._used = dict.fromkeys(self.groups, 0)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self.pool.num_free_blocks

    def num_used_blocks(self, group: str) -> int:
        """Blocks that requests hold for a group of keys; a shared one counts for each holder."""
        return self._used[known_group(group, self._used)]

    def start(self, token_ids: TokenIds = (), key: Hashable = None) -> SequenceBlocks:
        """The blocks of a new request, with the longest prefix that every group has cached.

        The prefix ends at a common multiple of the block sizes. A group with a window needs the
        blocks that its next query sees; blocks before them may have been evicted, and the null
        block stands for them. State layers need a checkpoint at its end (T17).

        Args:
            token_ids: tokens of the request; without them, nothing is reused.
            key: as in `BlockAllocator.acquire_prefix`.

        Raises:
            ContractError: `token_ids` are not integers.
        """
        tokens = as_tokens(token_ids)
        found = {
            name: self.pool.find_contents(tokens, (name, key), block_size=group.block_size)
            for name, group in self.groups.items()
        }
        step, has_states = self.common_block_size, self._states.has_checkpoint
        prefix = longest_prefix(self.groups, found, step, has_states)
        states, reused = self._states.start(prefix.last), prefix.num_tokens
        sequence = SequenceBlocks({}, reused, prefix.num_keys, key, states)
        for name, group in self.groups.items():
            count = reused // group.block_size
            dead = min(group.first_visible(reused) // group.block_size, count)
            kept = [node.block for node in found[name][dead:count] if node.block is not None]
            self.pool.acquire(kept)
            sequence.blocks[name] = [NULL_BLOCK] * dead + kept
            sequence._freed[name] = dead
            last = found[name][count - 1] if count else self.pool.start_of((name, key))
            sequence._chains[name] = (count, last)
            self._used[name] += len(kept)
        return sequence

    @property
    def common_block_size(self) -> int:
        """Least common multiple of the block sizes: where prefixes and checkpoints end."""
        return lcm(*(group.block_size for group in self.groups.values()))

    def num_missing_blocks(self, sequence: SequenceBlocks, num_tokens: int) -> int:
        """Blocks of all groups that `grow` allocates for the first `num_tokens` tokens."""
        return sum(sum(each.values()) for each in self._needed(sequence, num_tokens))

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Allocate blocks for the first `num_tokens` tokens of a request in every group of keys,
        and the slots of its states. If too few blocks are free for a checkpoint beside its slots,
        and no other request reads it, the next step overwrites it.

        Raises:
            CacheExhaustedError: fewer blocks are free; none is allocated.
            ContractError: `num_tokens` is not a count.
        """
        missing, slots = self._needed(sequence, num_tokens)
        fresh = self.pool.allocate(sum(missing.values()) + sum(slots.values()))
        if not slots:
            self._states.write_sources(sequence.states)
        for name, count in slots.items():
            sequence.states.slots[name] += fresh[:count]
            del fresh[:count]
        for name, count in missing.items():
            sequence.blocks[name] += fresh[:count]
            self._used[name] += count
            del fresh[:count]

    def advance(self, sequence: SequenceBlocks, token_ids: TokenIds) -> None:
        """Record that a step has written keys and values: full blocks become findable, and blocks
        behind the windows are freed.

        Args:
            token_ids: all tokens of the request whose keys and values are in the caches.

        Raises:
            ContractError: fewer tokens than before, more than the blocks hold, or tokens that are
                not integers.
        """
        count = token_count(token_ids)
        states, runs = as_sequence(sequence).states, count > sequence.num_computed
        slots = self._states.missing(states) if runs else {}
        missing = {**sequence.missing(self.groups, count), **slots}
        if count < sequence.num_computed or any(missing.values()):
            raise ContractError(
                f"{count} tokens are computed, but {sequence.num_computed} were before, and the "
                f"blocks hold {sequence.capacity(self.groups)}: grow the request first"
            )
        if self.pool.prefix_caching and self.groups:
            first = min(sequence._chains[name][0] * g.block_size for name, g in self.groups.items())
            new = as_tokens(token_ids[first:count])
            for name, group in self.groups.items():
                self._commit(sequence, name, group.block_size, new, first)
        sequence.num_computed = count
        if runs:  # a request without new tokens has not read its sources (T11)
            self._states.advance(states)
        self._free_behind_windows(sequence)

    def keep(self, sequence: SequenceBlocks) -> None:
        """After `advance`, keep the states as a checkpoint for prefixes, without a copy (T16): the
        next step reads them and writes new slots, which `grow` allocates.

        Raises:
            ContractError: no multiple of `common_block_size`, or no step since the last call.
        """
        count = as_sequence(sequence).num_computed
        if not self.groups or not count or count % self.common_block_size:
            raise ContractError(
                f"a checkpoint after {count} tokens would not be found: end the step at a multiple "
                f"of {self.common_block_size if self.groups else 'the blocks of a group of keys'}",
                rule="T16",
            )
        if sequence.states.sources:
            raise ContractError(
                f"the states after {count} tokens are kept already, or were not written: run a "
                "step first",
                rule="T16",
            )
        name, group = next(iter(self.groups.items()))
        done, node = sequence._chains[name]
        self._states.keep(sequence.states, node if done * group.block_size == count else None)

    def fork(self, sequence: SequenceBlocks) -> tuple[SequenceBlocks, dict[str, list[list[int]]]]:
        """A second request with the computed tokens of a first one, which shares its full blocks.
        The next steps of both read the states of the first one (T12).

        Returns:
            The request, and for each group of keys the pairs for `PagedKVCache.copy_blocks`.

        Raises:
            CacheExhaustedError: no block is free for a copy; nothing changes.
        """
        return fork_sequence(self, as_sequence(sequence))

    def state_slots(self, sequences: Sequence[SequenceBlocks]) -> dict[str, list[LayerSlots]]:
        """Group of states -> slots and sources of a batch, for each layer."""
        return self._states.layer_slots([each.states for each in sequences])

    def release(self, sequence: SequenceBlocks) -> None:
        """Free all blocks of a request. It is then empty, like a new one without a prefix."""
        for name, ids in as_sequence(sequence).blocks.items():
            held = ids[sequence._freed[name] :]
            self.pool.free(held)
            self._used[name] -= len(held)
        sequence.num_computed = 0
        self._states.release(sequence.states)
        for name in self.groups:
            sequence.blocks[name], sequence._freed[name] = [], 0
            sequence._chains[name] = (0, self.pool.start_of((name, sequence.key)))

    def block_tables(self, sequences: Sequence[SequenceBlocks]) -> dict[str, list[list[int]]]:
        """Group of keys -> one row of pages per request, for `group_batches`."""
        return {
            name: [group.pages(one.blocks[name]) for one in sequences]
            for name, group in self.groups.items()
        }

    def _commit(
        self, sequence: SequenceBlocks, name: str, size: int, tokens: tuple[int, ...], first: int
    ) -> None:
        """Make the full blocks of a group findable; `tokens` begin at position `first`."""
        done, node = sequence._chains[name]
        for start in range(done * size - first, len(tokens) - size + 1, size):
            if node is None:
                return  # no lookup reaches the blocks that follow
            block = sequence.blocks[name][done]
            node = self.pool.commit_block(node, tokens[start : start + size], block)
            done += 1
            sequence._chains[name] = (done, node)

    def _needed(
        self, sequence: SequenceBlocks, num_tokens: int
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Group of keys -> blocks to allocate, and the same of states, or {} where a step writes
        its sources."""
        keys = as_sequence(sequence).missing(self.groups, as_count("num_tokens", num_tokens))
        slots = self._states.missing(sequence.states)
        is_short = sum(keys.values()) + sum(slots.values()) > self.num_free_blocks
        return keys, {} if is_short and self._states.owns_sources(sequence.states) else slots

    def _free_behind_windows(self, sequence: SequenceBlocks) -> None:
        for name, group in self.groups.items():
            ids, freed = sequence.blocks[name], sequence._freed[name]
            dead = group.first_visible(sequence.num_computed) // group.block_size
            dead = min(dead, len(ids))
            if dead > freed:
                self.pool.free(ids[freed:dead], behind_window=True)
                ids[freed:dead] = [NULL_BLOCK] * (dead - freed)
                sequence._freed[name] = dead
                self._used[name] -= dead - freed
