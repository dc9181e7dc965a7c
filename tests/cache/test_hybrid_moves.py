"""Requests that move between pools: windows, states, prefixes, forks, refusals."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

import attnlib
from attnlib.cache.hybrid import HybridKVCache, KVCacheGroup, StateGroup
from attnlib.cache.hybrid_allocator import NULL_BLOCK, HybridBlockAllocator, SequenceBlocks
from attnlib.errors import CacheExhaustedError, ContractError
from attnlib.testing.states.kinds import KINDS

FULL = attnlib.AttentionSpec(
    num_heads=2, num_kv_heads=1, head_size=8, dtype=torch.float32, block_size=4
)
WINDOW = FULL.replace(sliding_window=6, block_size=2)
GROUPS = {"full": KVCacheGroup(FULL), "window": KVCacheGroup(WINDOW, 2)}
STATES = {"states": StateGroup(KINDS["gated delta"].replace(form="plain"), 2)}


def number(*parts: object) -> int:
    """A number for a content, exact in float32."""
    return zlib.crc32(repr(parts).encode()) % 2**20 + 1


@dataclass
class Pool:
    """A pool whose contents are numbers of the tokens that they stand for."""

    allocator: HybridBlockAllocator
    memory: HybridKVCache

    @classmethod
    def create(cls, groups: dict, blocks: int, caching: bool = True) -> Pool:
        allocator = HybridBlockAllocator(groups, blocks, prefix_caching=caching)
        return cls(allocator, HybridKVCache(groups, blocks, "cpu"))

    def write(self, one: SequenceBlocks, tokens: list[int], end: int) -> None:
        """A step up to `end` tokens, which reads and writes states."""
        first = one.num_computed
        self.allocator.grow(one, end)
        for name, layers in self.allocator.state_slots([one]).items():
            memory = self.memory.states[name].memory
            for layer, (slots, sources) in enumerate(layers):
                if first:
                    expected = number(name, layer, tokens[:first]) % 251
                    assert (memory[sources[0]] == expected).all()
                memory[slots[0]] = number(name, layer, tokens[:end]) % 251
        for name, caches in self.memory.caches.items():
            size = self.memory.groups[name].block_size
            for layer, cache in enumerate(caches):
                for place in range(first, end):
                    block = one.blocks[name][place // size]
                    value = number(name, layer, tokens[: place + 1])
                    cache.key_cache[block, place % size] = value
                    cache.value_cache[block, place % size] = -value
        self.allocator.advance(one, tokens[:end])
        self.check(one, tokens)

    def check(self, one: SequenceBlocks, tokens: list[int]) -> None:
        """Keys that the next query sees, and states that the next step reads."""
        count = one.num_computed
        for name, caches in self.memory.caches.items():
            group = self.memory.groups[name]
            for layer, cache in enumerate(caches):
                for place in range(group.first_visible(count), count):
                    block = one.blocks[name][place // group.block_size]
                    assert block != NULL_BLOCK
                    value = number(name, layer, tokens[: place + 1])
                    offset = place % group.block_size
                    assert (cache.key_cache[block, offset] == value).all()
                    assert (cache.value_cache[block, offset] == -value).all()
        for name, slots in one.states.slots.items():
            read = one.states.sources.get(name, slots)
            for layer, block in enumerate(read if count else []):
                expected = number(name, layer, tokens[:count]) % 251
                assert (self.memory.states[name].memory[block] == expected).all()

    def held(self, sequences: list[SequenceBlocks]) -> None:
        """References and used blocks are those of the requests; the null block is zero."""
        counts: Counter[int] = Counter()
        for one in sequences:
            for name, ids in one.blocks.items():
                counts.update(ids[one._freed[name] :])
            for each in (one.states.slots, one.states.sources):
                for blocks in each.values():
                    counts.update(blocks)
        pool = self.allocator.pool
        for block in range(1, pool.num_blocks):
            assert pool.ref_count(block) == counts[block]
        for name in self.allocator.groups:
            used = sum(len(one.blocks[name]) - one._freed[name] for one in sequences)
            assert self.allocator.num_used_blocks(name) == used
        assert not self.memory._storage[0].any()


def move(
    source: Pool, target: Pool, one: SequenceBlocks, tokens: list[int]
) -> tuple[SequenceBlocks, int]:
    """The request in the other pool, and the blocks that were copied."""
    found, pairs = target.allocator.adopt(source.allocator, one, tokens)
    source.memory.swap_blocks(target.memory, pairs)
    return found, len(pairs)


@pytest.mark.parametrize(
    "groups", [GROUPS, {**GROUPS, **STATES}, STATES], ids=lambda g: "+".join(g)
)
def test_a_request_continues_in_another_pool(groups: dict) -> None:
    """P12, T15: blocks behind a window are not copied; keys, states and lengths are."""
    device, host = Pool.create(groups, 40), Pool.create(groups, 30)
    tokens = list(range(100, 140))
    one = device.allocator.start(tokens)
    for end in (7, 15, 21):
        device.write(one, tokens, end)
    parked, copied = move(device, host, one, tokens[:21])
    live = sum(len(ids) - one._freed[name] for name, ids in one.blocks.items())
    assert copied == live + (2 if "states" in groups else 0)
    assert parked.num_computed == 21
    host.check(parked, tokens)
    device.allocator.release(one)
    assert device.allocator.num_free_blocks == 39
    back, _ = move(host, device, parked, tokens[:21])
    host.allocator.release(parked)
    device.write(back, tokens, 30)
    device.held([back])
    host.held([])


def test_cached_blocks_are_shared_and_copied_ones_are_found() -> None:
    """T17: a second request with the same beginning copies the rest, and `start` finds both."""
    device, host = Pool.create(GROUPS, 60), Pool.create(GROUPS, 60)
    tokens = list(range(40))
    requests = []
    for ends in ((8, 16), (8, 16, 21)):
        one = device.allocator.start()
        for end in ends:
            device.write(one, tokens, end)
        requests.append(one)
    first, all_copied = move(device, host, requests[0], tokens[:16])
    second, rest = move(device, host, requests[1], tokens[:21])
    assert all_copied == 4 + 3 and rest == 2 + 3  # full blocks, and those that a window shows
    assert second.blocks["full"][:4] == first.blocks["full"]
    found = host.allocator.start(tokens)
    assert found.num_computed == 20
    host.check(found, tokens)
    host.write(found, tokens, 40)
    host.held([first, second, found])


def test_a_pool_that_is_full_changes_nothing() -> None:
    device, host = Pool.create(GROUPS, 40), Pool.create(GROUPS, 6)
    tokens = list(range(30))
    one = device.allocator.start(tokens)
    device.write(one, tokens, 30)
    with pytest.raises(CacheExhaustedError):
        host.allocator.adopt(device.allocator, one, tokens)
    host.held([])
    assert host.allocator.num_free_blocks == 5
    device.check(one, tokens)


def test_other_pools_and_pairs_are_refused() -> None:
    one = Pool.create({**GROUPS, **STATES}, 9)
    request = one.allocator.start()
    one.write(request, [1, 2, 3, 4, 5], 5)
    other_groups = (
        GROUPS,
        {**GROUPS, "states": replace(STATES["states"], num_layers=1)},
        {**STATES, **GROUPS, "full": KVCacheGroup(FULL.replace(block_size=8))},
    )
    for groups in other_groups:
        other = Pool.create(groups, 9)
        with pytest.raises(ContractError, match="requests move between pools of equal groups"):
            other.allocator.adopt(one.allocator, request)
        with pytest.raises(ContractError, match="pools of equal groups|block_size is 4 in the so"):
            one.memory.swap_blocks(other.memory, [(1, 1)])
    same = Pool.create({**GROUPS, **STATES}, 9)
    with pytest.raises(ContractError, match="4 token_ids are given, but 5 tokens"):
        same.allocator.adopt(one.allocator, request, [1, 2, 3, 4])
    with pytest.raises(ContractError, match="pass the HybridBlockAllocator"):
        same.allocator.adopt(one.allocator.pool, request)
    with pytest.raises(ContractError, match="pass the SequenceBlocks"):
        same.allocator.adopt(one.allocator, [1])
    for pairs, message in (
        ([(0, 1)], "null block"),
        ([(1, 0)], "null block"),
        ([(1, 9)], "outside the pool of 9 blocks"),
        ([(1, 2), (3, 2)], "occurs more than once"),
    ):
        with pytest.raises(ContractError, match=message):
            one.memory.swap_blocks(same.memory, pairs)
    with pytest.raises(ContractError, match="pass a HybridKVCache"):
        one.memory.swap_blocks(one.memory.caches["full"][0], [(1, 1)])
    assert not same.memory._storage.any()


def test_quantized_pools_need_equal_scales() -> None:
    """M9: elements are copied as stored."""
    groups = {"full": KVCacheGroup(FULL.replace(kv_cache_dtype="fp8_e4m3"))}
    one, other = Pool.create(groups, 4), Pool.create(groups, 4)
    one.memory.caches["full"][0].k_scale = 0.5
    with pytest.raises(ContractError, match="k_scale"):
        one.memory.swap_blocks(other.memory, [(1, 1)])


def run_random_requests(seed: int, steps: int) -> int:
    """Requests that start, step, keep, fork, move and end in two pools; returns the moves."""
    rng = random.Random(seed)
    groups = rng.choice([GROUPS, {**GROUPS, **STATES}, {"window": GROUPS["window"], **STATES}])
    pools = [Pool.create(groups, rng.randint(14, 40), rng.random() < 0.85) for _ in range(2)]
    live: list[tuple[int, SequenceBlocks, list[int]]] = []
    prompts = [[rng.randrange(4) for _ in range(60)] for _ in range(3)]
    moves = 0
    for _ in range(steps):
        action = rng.choice("ssgggggkfmmmrp")
        try:
            if action == "s":
                place, keep = rng.randrange(2), rng.randrange(1, 60)
                tokens = rng.choice(prompts)[:keep] + [rng.randrange(4) for _ in range(60 - keep)]
                one = pools[place].allocator.start(tokens, rng.choice([None, "a"]))
                pools[place].check(one, tokens)
                live.append((place, one, tokens))
            elif live:
                index = rng.randrange(len(live))
                place, one, tokens = live[index]
                allocator = pools[place].allocator
                if action == "g" and one.num_computed < 60:
                    end = min(one.num_computed + rng.randint(1, 9), 60)
                    if rng.random() < 0.4:  # where `keep` is possible
                        end -= end % allocator.common_block_size
                    if end <= one.num_computed:
                        continue
                    pools[place].write(one, tokens, end)
                elif action == "k" and one.num_computed:
                    if one.num_computed % allocator.common_block_size == 0:
                        if not one.states.sources and "states" in groups:
                            allocator.keep(one)
                elif action == "f" and one.num_computed:
                    second, pairs = allocator.fork(one)
                    for name, each in pairs.items():
                        for cache in pools[place].memory.caches[name]:
                            cache.copy_blocks(each)
                    other = tokens[: one.num_computed]
                    other = other + [rng.randrange(4) for _ in range(60 - len(other))]
                    live.append((place, second, other))
                elif action == "m":
                    target = rng.randrange(2)
                    known = tokens[: one.num_computed] if rng.random() < 0.7 else []
                    if known and rng.random() < 0.5:
                        known = tokens
                    found, _ = move(pools[place], pools[target], one, known)
                    pools[target].check(found, tokens)
                    moves += 1
                    if rng.random() < 0.7:
                        allocator.release(one)
                        live[index] = (target, found, tokens)
                    else:
                        live.append((target, found, tokens))
                elif action == "r":
                    allocator.release(one)
                    live.pop(index)
                elif action == "p":  # preempted: computed again later
                    allocator.release(one)
                    live[index] = (place, allocator.start(tokens), tokens)
        except CacheExhaustedError:
            if live:
                place, one, _ = live.pop(rng.randrange(len(live)))
                pools[place].allocator.release(one)
        for number_of, pool in enumerate(pools):
            mine = [one for place, one, _ in live if place == number_of]
            pool.held(mine)
        for place, one, tokens in live:
            pools[place].check(one, tokens)
    return moves


def test_random_requests() -> None:
    assert sum(run_random_requests(seed, 60) for seed in range(12)) > 50
