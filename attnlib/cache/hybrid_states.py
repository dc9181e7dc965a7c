"""Blocks of states in a pool that state layers share with keys: slots, sources, checkpoints.

A checkpoint is a slot that a request has left behind (T16). Its blocks, one per layer, are contents
behind the last key block of the request, so that a lookup of tokens finds both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attnlib.cache.allocator import BlockAllocator
from attnlib.cache.hybrid_groups import StateGroup
from attnlib.cache.prefix_tree import Label, PrefixNode
from attnlib.errors import ContractError

__all__ = ["LayerSlots", "SequenceStates", "StateBlocks"]


class LayerSlots(NamedTuple):
    """The slots of a batch in one layer, for `CommonAttentionMetadata` and `StateMetadata`.

    Attributes:
        slots: the slot of each request (T7).
        sources: the slot that each request reads (T12).
    """

    slots: list[int]
    sources: list[int]


@dataclass(eq=False)
class SequenceStates:
    """The state blocks of one request; one per layer and group.

    Attributes:
        slots: group name -> blocks that steps write; empty before the first step.
        sources: group name -> blocks that the next step reads in place of `slots`; empty for its
            own.
    """

    slots: dict[str, list[int]] = field(default_factory=dict)
    sources: dict[str, list[int]] = field(default_factory=dict)


class StateBlocks:
    """The state blocks of all requests.

    Args:
        pool: the blocks of keys and states.
        groups: the groups of states.
    """

    def __init__(self, pool: BlockAllocator, groups: Mapping[str, StateGroup]) -> None:
        self.pool = pool
        self.groups = dict(groups)
        self._labels = {
            name: [Label((name, layer)) for layer in range(group.num_layers)]
            for name, group in groups.items()
        }

    def has_checkpoint(self, node: PrefixNode) -> bool:
        """Whether all layers have a state behind a content of keys."""
        labels = (label for each in self._labels.values() for label in each)
        return all(node.block_at(label) is not None for label in labels)

    def start(self, node: PrefixNode | None) -> SequenceStates:
        """The blocks of a new request: sources at a checkpoint, or none."""
        states = SequenceStates({name: [] for name in self.groups})
        if node is not None:
            for name, labels in self._labels.items():
                found = [node.block_at(label) for label in labels]
                states.sources[name] = [block for block in found if block is not None]
                self.pool.acquire(states.sources[name])
        return states

    def missing(self, states: SequenceStates) -> dict[str, int]:
        """Group name -> blocks to allocate before the next step."""
        return {
            name: group.num_layers - len(states.slots[name]) for name, group in self.groups.items()
        }

    def owns_sources(self, states: SequenceStates) -> bool:
        """Whether a request without slots is the only one to read its sources."""
        held = [block for each in states.sources.values() for block in each]
        has_slots = any(states.slots.values())
        return bool(held) and not has_slots and all(self.pool.ref_count(b) == 1 for b in held)

    def write_sources(self, states: SequenceStates) -> None:
        """Make slots of the sources of a request that owns them: no lookup finds them again."""
        for name, held in states.sources.items():
            states.slots[name] = [self.pool.make_writable(block)[0] for block in held]
        states.sources.clear()

    def advance(self, states: SequenceStates) -> None:
        """A step has written the slots: its sources are no longer read."""
        for held in states.sources.values():
            self.pool.free(held)
        states.sources.clear()

    def keep(self, states: SequenceStates, node: PrefixNode | None) -> None:
        """Leave the slots behind as a checkpoint; the next step reads them and writes others.

        Args:
            states: of a request that reads no sources.
            node: the content of its last key block; None if no lookup reaches it.
        """
        for name, labels in self._labels.items():
            held = states.slots[name]
            if node is not None and self.pool.prefix_caching:
                for label, block in zip(labels, held, strict=True):
                    self.pool.commit_block(node, label, block)
            states.sources[name], states.slots[name] = held, []

    def fork(self, states: SequenceStates) -> SequenceStates:
        """The states of a second request that continues like a first one; neither writes what both
        read."""
        if not states.sources and any(states.slots.values()):
            self.keep(states, None)
        copied = SequenceStates({name: [] for name in self.groups})
        for name, held in states.sources.items():
            self.pool.retain(held)
            copied.sources[name] = list(held)
        for name, fresh in states.slots.items():  # allocated, and not written yet
            self.pool.free(fresh)
            states.slots[name] = []
        return copied

    def release(self, states: SequenceStates) -> None:
        """Free all blocks of a request."""
        self.advance(states)
        for name, held in states.slots.items():
            self.pool.free(held)
            states.slots[name] = []

    def layer_slots(self, all_states: Sequence[SequenceStates]) -> dict[str, list[LayerSlots]]:
        """Group name -> the slots of a batch in each layer.

        Raises:
            ContractError: a request without slots.
        """
        for place, one in enumerate(all_states):
            if any(self.missing(one).values()):
                raise ContractError(
                    f"request {place} has no slots for its next step: grow it first, also after "
                    "keep, fork and release",
                    rule="T15",
                )
        found = {}
        for name, group in self.groups.items():
            slots = [one.slots[name] for one in all_states]
            sources = [one.sources.get(name, one.slots[name]) for one in all_states]
            found[name] = [
                LayerSlots([own[n] for own in slots], [read[n] for read in sources])
                for n in range(group.num_layers)
            ]
        return found
