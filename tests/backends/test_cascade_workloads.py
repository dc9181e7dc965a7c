"""Shared prefixes over several decode steps: answers to one prompt, beams, and trees of agents."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.cascade.schedule import EVERY_PREFIX
from attnlib.backends.torch.metadata import TorchMetadataBuilder
from attnlib.cache.allocator import BlockAllocator
from attnlib.selection import merge_attention

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4
)
PROMPT = 18
"""Tokens of the prompt: its last block is shared by all sequences until each writes its own."""


class Sequences:
    """Sequences over one cache, which are forked by reference and decoded by two backends."""

    def __init__(self) -> None:
        self.allocator = BlockAllocator(300, SPEC.block_size)
        self.cache = attnlib.PagedKVCache.allocate(SPEC, 300, "cpu")
        self.cache.key_cache.normal_()
        self.cache.value_cache.normal_()
        self.live = [(self.allocator.allocate(-(-PROMPT // 4)), PROMPT)]
        pair: Any = merge_attention("torch", "torch", EVERY_PREFIX)
        flat: Any = attnlib.get_attn_backend(SPEC, "torch", "cpu")
        self._layers = [attnlib.Attention(SPEC, backend=x, device="cpu") for x in (pair, flat)]
        self._builders = [x.make_builder(SPEC, "cpu") for x in (pair, flat)]
        self.largest: list[int] = []

    def fork(self, parents: list[int]) -> None:
        """Replace the sequences by copies of some of them."""
        before, self.live = self.live, [self.live[parent] for parent in parents]
        for blocks, _ in self.live:
            self.allocator.retain(blocks)
        self.allocator.free(block for blocks, _ in before for block in blocks)
        self.live = [(list(blocks), length) for blocks, length in self.live]

    def decode(self, prefixes: int) -> None:
        """Decode one token of each sequence, with at least this number of shared prefixes."""
        for number, (blocks, length) in enumerate(self.live):
            if length % 4 == 0:
                blocks.append(self.allocator.allocate()[0])
            else:
                blocks[-1], copied = self.allocator.make_writable(blocks[-1])
                if copied is not None:
                    self.cache.copy_blocks([copied])
            self.live[number] = blocks, length + 1
        lengths = [length for _, length in self.live]
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1] * len(lengths), lengths, [blocks for blocks, _ in self.live], 4, "cpu"
        )
        rows = [torch.randn(len(lengths), heads, 16) for heads in (4, 2, 2)]
        reference, outputs = copy.deepcopy(self.cache), []
        for layer, builder, cache in zip(
            self._layers, self._builders, (self.cache, reference), strict=True
        ):
            metadata: Any = builder.build(0, common)
            outputs.append(layer(*rows, cache, metadata))
            found = getattr(metadata, "shared_prefixes", None)
            if found is not None:
                assert len(found) >= prefixes
                self.largest.append(max((len(prefix.requests) for prefix in found), default=0))
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        assert torch.equal(self.cache.key_cache, reference.key_cache)


@pytest.fixture(params=[None, (8, 5)], ids=["two launches", "one kernel"])
def sequences(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sequences:
    torch.manual_seed(0)
    shape = property(lambda self: request.param)
    monkeypatch.setattr(TorchMetadataBuilder, "shared_decode_shape", shape)
    return Sequences()


def test_answers_to_one_prompt(sequences: Sequences) -> None:
    """M13: 64 sequences of a prompt, of which some end earlier, as in reinforcement learning."""
    sequences.fork([0] * 64)
    for step in range(5):
        sequences.decode(prefixes=1)
        assert sequences.largest[-1] == len(sequences.live)
        if step == 2:
            sequences.fork(list(range(0, 64, 3)))


def test_beams(sequences: Sequences) -> None:
    """M13: in each step the beams are copies of some of the beams before."""
    draw = random.Random(0)
    sequences.fork([0] * 6)
    for _ in range(12):
        sequences.decode(prefixes=1)
        sequences.fork(sorted(draw.choices(range(6), k=6)))
    assert max(sequences.largest) == 6


def test_trees_of_agents(sequences: Sequences) -> None:
    """M13: three branches of the prompt, three of each later; prefixes of two levels."""
    sequences.fork([0, 0, 0])
    for _ in range(9):
        sequences.decode(prefixes=1)
    sequences.fork([0, 0, 0, 1, 1, 1, 2, 2, 2])
    for _ in range(4):
        sequences.decode(prefixes=4)
    sequences.fork([0, 2, 3, 4, 5, 8])
    sequences.decode(prefixes=3)
