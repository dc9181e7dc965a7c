"""Keys and states in one pool: blocks, checkpoints without copies, prefixes, forks, eviction."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import attnlib
from attnlib.cache.hybrid import HybridKVCache, KVCacheGroup, StateGroup, with_equal_blocks
from attnlib.cache.hybrid_allocator import NULL_BLOCK, HybridBlockAllocator, SequenceBlocks
from attnlib.cache.hybrid_groups import pool_block_bytes
from attnlib.errors import CacheExhaustedError, ContractError
from attnlib.metadata.groups import StateGroupBatch, group_batches
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.layers import compare_results, expected
from attnlib.testing.states.serving import Results

KEYS = attnlib.AttentionSpec(
    num_heads=2, num_kv_heads=1, head_size=8, dtype=torch.float32, block_size=4
)
GDN = KINDS["gated delta"].replace(form="plain")
LARGE_STATE = StateGroup(GDN.replace(num_heads=64, num_key_heads=64, key_size=32))
GROUPS = {"keys": KVCacheGroup(KEYS), "states": StateGroup(GDN, 2)}
SIZE = 4


def allocator(num_blocks: int = 24, **changes: object) -> HybridBlockAllocator:
    return HybridBlockAllocator(GROUPS, num_blocks, **changes)


def run(blocks: HybridBlockAllocator, one: SequenceBlocks, tokens: list[int], end: int) -> None:
    """A step up to `end` tokens."""
    blocks.grow(one, end)
    blocks.advance(one, tokens[:end])


def test_a_block_holds_a_state_or_a_multiple_of_key_blocks() -> None:
    groups = with_equal_blocks(GROUPS)
    state, key = groups["states"].block_bytes, groups["keys"].bytes_per_token
    assert groups["keys"].block_size == state // (4 * key) * 4 > 4
    assert groups["keys"].block_size & (groups["keys"].block_size - 1)  # no power of two
    several = with_equal_blocks({**GROUPS, "wide": KVCacheGroup(KEYS, 2)})
    assert several["keys"].block_size == 2 * several["wide"].block_size
    assert several["keys"].page_size is None
    large = with_equal_blocks({**GROUPS, "wide": KVCacheGroup(KEYS, 2), "state": LARGE_STATE})
    assert large["keys"].block_size == 2048 and large["keys"].page_size == 256
    pool = HybridKVCache(groups, 6, "cpu")
    assert pool.block_bytes >= state and set(pool.caches) == {"keys"}
    states = pool.states["states"]
    assert (states.num_slots, states.spec) == (6, GDN)
    states.tensors.state[3].fill_(1)
    own = groups["keys"].pages([3])
    (cache,) = pool.caches["keys"]
    assert len(own) == groups["keys"].block_size // 4 and cache.block_size == 4
    assert cache.key_cache[own[2:]].flatten(1).all()  # behind the positions of the slot
    others = groups["keys"].pages([0, 1, 2, 4, 5])
    assert not cache.key_cache[others].any() and not cache.value_cache[others].any()
    for make, message in (
        (lambda: KVCacheGroup(GDN), "KVCacheGroup takes an attnlib.AttentionSpec"),
        (lambda: StateGroup(KEYS), "StateGroup takes an attnlib.StateSpec"),
        (lambda: KVCacheGroup(KEYS, 1.5), "num_layers 1.5 is a float"),
        (lambda: KVCacheGroup(KEYS, 1, 3), "page_size=3 does not divide blocks of 4 tokens"),
        (lambda: KVCacheGroup(KEYS, 1, 0), "page_size=0 does not divide"),
        (lambda: KVCacheGroup(KEYS, 1, 8), "page_size=8 does not divide"),
        (lambda: KVCacheGroup(KEYS.replace(head_size_v=16), 1, 2), "pages of different sizes"),
        (lambda: HybridKVCache(GROUPS, 2.5), "num_blocks 2.5 is a float"),
    ):
        with pytest.raises(ContractError, match=message):
            make()
    with pytest.raises(ContractError, match="a group of 0 state layers"):
        StateGroup(GDN, 0)


def test_the_null_block_is_no_slot() -> None:
    """P12: a step, a copy and a load with slot 0 leave it zero, also in a copy of the cache."""
    layer = attnlib.StateLayer(
        GDN, conv_weight=draw_layer(GDN).conv_weight, backend="torch", device="cpu"
    )
    pool = HybridKVCache(GROUPS, 5, "cpu")
    cache, tokens = pool.states["states"], draw_tokens(GDN, 2, 0)
    batch = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 1], [1, 1], device="cpu", state_slots=[0, 3]
    )
    metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, batch)
    inputs = tokens.query, tokens.key, tokens.value, tokens.log_decay, tokens.beta
    state = cache.export([2], [0])
    for one in (cache, pickle.loads(pickle.dumps(cache))):
        for call in (
            lambda one=one: layer.convolve(tokens.x, one, metadata),
            lambda one=one: layer(*inputs, one, metadata),
            lambda one=one: one.copy_slots([(3, 0)]),
            lambda one=one: one.load([0], [4], state),
        ):
            with pytest.raises(ContractError, match=r"=0 is outside the .* of 5 slots \(1 to 4"):
                call()
        assert not one.memory.any()


def test_a_batch_names_each_request_once() -> None:
    """Two rows of one request would write the same slots and blocks (T7)."""
    blocks = allocator()
    one = blocks.start()
    blocks.grow(one, SIZE)
    for requests, lengths in (([one, one], [1, 1]), ([one], [1, 1]), ([one], [])):
        with pytest.raises(ContractError, match="name each request once"):
            group_batches(blocks, requests, lengths, "cpu")
    for requests, lengths in (([one], {1}), ({"first": one}, [1])):
        with pytest.raises(ContractError, match="which has no order: pass a list"):
            group_batches(blocks, requests, lengths, "cpu")


def test_pages_of_several_groups_hardly_enlarge_a_block() -> None:
    """Groups of different head counts have pages whose sizes have large common multiples."""
    kinds = {"num_heads": 24, "dtype": torch.bfloat16, "block_size": 16}
    full = KEYS.replace(**kinds, num_kv_heads=8, head_size=128, head_size_v=128)
    narrow = KEYS.replace(**kinds, num_kv_heads=3, head_size=96, head_size_v=96)
    state = GDN.replace(num_heads=64, num_key_heads=16, key_size=128, value_size=128)
    given = {"full": KVCacheGroup(full), "narrow": KVCacheGroup(narrow, 3)}
    groups = with_equal_blocks({**given, "states": StateGroup(state, 9)})
    assert groups["full"].page_size == groups["narrow"].page_size == 256
    assert with_equal_blocks(groups) == groups
    largest = groups["states"].block_bytes
    assert largest <= pool_block_bytes(groups) < 1.01 * largest


LATENTS = KEYS.replace(num_heads=1, num_kv_heads=1, head_size=24, head_size_v=16, use_mla=True)
PAGED = {
    "keys": KVCacheGroup(KEYS.replace(num_kv_heads=2), 3),
    "latents": KVCacheGroup(LATENTS, 3),
    "uneven": KVCacheGroup(KEYS.replace(head_size_v=16)),  # one page per block
    **{
        name: KVCacheGroup(KEYS.replace(head_size=16, head_size_v=size, kv_cache_dtype=name), 3)
        for name, size in (("int8_per_token_head", 48), ("nvfp4", 16))
    },
}


@pytest.mark.parametrize("name", PAGED)
def test_pages_of_a_block_are_its_memory(name: str) -> None:
    """Each block of each layer has memory of its own, inside the block."""
    spec = KINDS["mamba2"].replace(form="plain")
    groups = with_equal_blocks({name: PAGED[name], "states": StateGroup(spec, 2)})
    group = groups[name]
    assert (group.page_size is None) is (name == "uneven") and group.block_size > 8
    pool = HybridKVCache(groups, 5, "cpu")
    for block in range(5):
        pages = group.pages([block])
        written = torch.zeros_like(pool._storage, dtype=torch.int32)
        for cache in pool.caches[name]:
            parts = {id(x): x for x in (cache.key_cache, cache.value_cache)}
            whole = cache.pages  # with scales
            for stored in parts.values() if whole is None else [whole]:
                pool._storage.zero_()
                stored[pages] = 1
                written += pool._storage.view(torch.float32).ne(0).repeat_interleave(4, 1)
        per_layer = 2 if name == "latents" else 1  # a value is a part of its key
        assert written.max() == per_layer and not written[[n for n in range(5) if n != block]].any()
        bytes_written = int((written > 0).sum())
        assert bytes_written == group.block_size * group.bytes_per_token


def test_forks_copy_the_pages_of_a_block() -> None:
    groups = with_equal_blocks(GROUPS)
    pool, blocks = HybridKVCache(groups, 12, "cpu"), HybridBlockAllocator(groups, 12)
    size, tokens = groups["keys"].block_size, list(range(200))
    one = blocks.start(tokens)
    run(blocks, one, tokens, size + 6)
    (table,), (cache,) = blocks.block_tables([one])["keys"], pool.caches["keys"]
    cache.key_cache[table] = torch.arange(1.0, 1 + len(table))[:, None, None, None]
    other, pairs = blocks.fork(one)
    cache.copy_blocks(pairs["keys"])
    (forked,) = blocks.block_tables([other])["keys"]
    assert len(forked) == len(table) == 2 * size // 4 and forked[: size // 4] == table[: size // 4]
    assert torch.equal(cache.key_cache[forked], cache.key_cache[table])


def test_a_checkpoint_is_left_behind() -> None:
    """T16, T17: no copy; the next step reads it, and a second request finds it."""
    blocks, tokens = allocator(), list(range(20))
    one = blocks.start(tokens)
    assert blocks.num_missing_blocks(one, 8) == 2 + 2
    run(blocks, one, tokens, 8)
    kept = list(one.states.slots["states"])
    blocks.keep(one)
    assert one.states.slots["states"] == [] and one.states.sources["states"] == kept
    blocks.grow(one, 9)
    (first, second) = blocks.state_slots([one])["states"]
    assert [first.sources, second.sources] == [[block] for block in kept]
    assert len({*first.slots, *second.slots, *kept, *one.blocks["keys"]}) == 4 + 3
    blocks.advance(one, tokens[:9])
    assert one.states.sources == {} and blocks.pool.ref_count(kept[0]) == 0
    other = blocks.start(tokens[:10])
    assert other.num_computed == 8 and other.states.sources["states"] == kept
    assert blocks.start([*tokens[:7], 99, 98]).num_computed == 0
    for each in (one, other):
        blocks.release(each)
    assert blocks.num_free_blocks == 23


def test_slots_of_requests_that_did_not_grow() -> None:
    """They would be those of an earlier step, or none."""
    blocks, tokens = allocator(), list(range(8))
    one = blocks.start(tokens)
    with pytest.raises(ContractError, match="request 0 has no slots .* grow it first"):
        blocks.state_slots([one])
    run(blocks, one, tokens, 5)
    other, _ = blocks.fork(one)
    for each in (one, other):
        with pytest.raises(ContractError, match="grow it first"):
            blocks.state_slots([each])
        blocks.grow(each, 6)
    assert len(blocks.state_slots([one, other])["states"]) == 2
    batch = group_batches(blocks, [], [], "cpu")["states"]
    assert isinstance(batch, StateGroupBatch) and batch.batch.num_reqs == 0
    assert [slots.tolist() for slots in batch.slots] == [[], []]


def test_a_prefix_needs_a_state() -> None:
    """T17: key blocks without a checkpoint at their end are no prefix, longer ones included."""
    blocks, tokens = allocator(), list(range(20))
    one = blocks.start(tokens)
    run(blocks, one, tokens, 4)
    blocks.keep(one)
    run(blocks, one, tokens, 16)
    assert blocks.start(tokens).num_computed == 4
    blocks.keep(one)
    assert blocks.start(tokens).num_computed == 16
    assert blocks.start(tokens, key="adapter").num_computed == 0


def test_evicted_checkpoints() -> None:
    """One layer without its state is enough to lose one; a shorter or longer one still serves."""
    blocks, tokens = allocator(13), list(range(20))
    one = blocks.start(tokens)
    for end in (4, 8):
        run(blocks, one, tokens, end)
        blocks.keep(one)
    blocks.release(one)

    def reused(count: int) -> int:
        found = blocks.start(tokens[:count])
        computed = found.num_computed
        blocks.release(found)
        return computed

    assert (reused(9), reused(6)) == (8, 4)
    assert reused(9) == 8  # that after 4 tokens was used least recently
    blocks.pool.allocate(blocks.pool.num_free_blocks - 5)  # unused ones and one of its layers
    assert (reused(6), reused(9)) == (0, 8)


def test_without_prefix_caching() -> None:
    blocks, tokens = allocator(prefix_caching=False), list(range(9))
    one = blocks.start(tokens)
    run(blocks, one, tokens, 8)
    blocks.keep(one)
    run(blocks, one, tokens, 9)
    assert blocks.start(tokens).num_computed == 0
    blocks.release(one)
    assert blocks.num_free_blocks == 23


@pytest.mark.parametrize(
    ("end", "message"),
    [(6, "a checkpoint after 6 tokens would not be found"), (0, "a checkpoint after 0 tokens")],
)
def test_refused_checkpoints(end: int, message: str) -> None:
    blocks, tokens = allocator(), list(range(9))
    one = blocks.start(tokens)
    if end:
        run(blocks, one, tokens, end)
    with pytest.raises(ContractError, match=message) as error:
        blocks.keep(one)
    assert error.value.rule == "T16"


def test_a_checkpoint_is_kept_once() -> None:
    blocks, tokens = allocator(), list(range(9))
    one = blocks.start(tokens)
    run(blocks, one, tokens, 4)
    blocks.keep(one)
    with pytest.raises(ContractError, match="are kept already"):
        blocks.keep(one)
    blocks.advance(one, tokens[:4])  # no step: its sources are still to be read
    assert one.states.sources
    with pytest.raises(ContractError, match="grow the request first"):
        blocks.advance(one, tokens[:5])


def test_no_free_block_changes_nothing() -> None:
    blocks, tokens = allocator(6), list(range(20))
    one = blocks.start(tokens)
    run(blocks, one, tokens, 8)
    blocks.keep(one)
    before = (list(one.blocks["keys"]), dict(one.states.sources))
    with pytest.raises(CacheExhaustedError):
        blocks.grow(one, 17)  # three more blocks of keys, and one is free
    assert before == (one.blocks["keys"], one.states.sources) and not one.states.slots["states"]


def test_a_checkpoint_gives_its_memory_to_its_own_request() -> None:
    """Only if memory is short, and no other request reads it."""
    blocks, tokens = allocator(6), list(range(20))
    one = blocks.start(tokens)
    run(blocks, one, tokens, 8)
    blocks.keep(one)
    kept = list(one.states.sources["states"])
    other = blocks.start(tokens)
    assert (other.num_computed, other.states.sources["states"]) == (8, kept)
    with pytest.raises(CacheExhaustedError):
        blocks.grow(one, 12)
    blocks.release(other)
    assert blocks.num_missing_blocks(one, 12) == 1
    blocks.grow(one, 12)
    assert one.states.slots["states"] == kept and not one.states.sources
    assert blocks.start(tokens).num_computed == 0
    blocks.advance(one, tokens[:12])
    blocks.release(one)
    assert blocks.num_free_blocks == 5


def test_keys_of_another_request_without_a_checkpoint() -> None:
    """Where a second request of the same beginning leaves one, a third one starts."""
    blocks, tokens = allocator(40), list(range(20))
    one = blocks.start(tokens)
    run(blocks, one, tokens, 19)
    other = blocks.start([*tokens[:13], 99, 98])
    assert (other.num_computed, other.num_cached_keys) == (0, 12)
    run(blocks, other, [*tokens[:13], 99, 98], other.num_cached_keys)
    blocks.keep(other)
    third = blocks.start([*tokens[:14], 97])
    assert third.num_computed == third.num_cached_keys == 12


def test_states_alone() -> None:
    """A model without keys: slots and forks, no prefixes."""
    blocks = HybridBlockAllocator({"states": StateGroup(GDN, 3)}, 20)
    one = blocks.start([1, 2, 3])
    run(blocks, one, [1, 2, 3], 2)
    with pytest.raises(ContractError, match="a group of keys"):
        blocks.keep(one)
    other, pairs = blocks.fork(one)
    assert pairs == {} and other.states.sources == one.states.sources
    run(blocks, other, [1, 2, 3], 3)
    run(blocks, one, [1, 2, 3], 3)
    blocks.release(one)
    blocks.release(other)
    assert blocks.num_free_blocks == 19


def served(pool: HybridKVCache, blocks: HybridBlockAllocator, keeps: bool) -> list[list[Results]]:
    """Two requests with a common prefix through a real layer, the second one after the first, and a
    fork of it; the outputs of all their tokens."""
    given = draw_layer(GDN)
    layer = attnlib.StateLayer(GDN, conv_weight=given.conv_weight, device="cpu")
    builder = layer.backend.make_builder(layer.spec, "cpu")
    prompts = [draw_tokens(GDN, 30, 1), draw_tokens(GDN, 30, 1)]
    ids = [list(range(30)), [*range(20), *range(50, 60)]]
    outs: list[list[Results]] = []
    for prompt, tokens in zip(prompts, ids, strict=True):
        one = blocks.start(tokens)
        requests = [one]
        outs.append([])
        while one.num_computed < 29:
            first = one.num_computed
            end = min(first - first % SIZE + SIZE, 29)
            results = []
            for each in requests:
                blocks.grow(each, end)
                slots = blocks.state_slots([each])["states"][1]
                common = attnlib.CommonAttentionMetadata.from_lengths(
                    [end - first], [end], device="cpu", state_slots=slots.slots,
                    state_sources=slots.sources,
                )  # fmt: skip
                metadata, part = builder.build(0, common), prompt.rows(first, end)
                x = layer.convolve(part.x, pool.states["states"], metadata)
                out = layer(
                    part.query, part.key, part.value, part.log_decay, part.beta,
                    pool.states["states"], metadata,
                )  # fmt: skip
                results.append(Results(x, out))
                blocks.advance(each, tokens[:end])
            if len(results) == 2:
                assert all(map(torch.equal, *results))
            outs[-1].append(results[0])
            if keeps and end % SIZE == 0:
                blocks.keep(one)
            if first == 20 and not keeps:
                copied, pairs = blocks.fork(one)
                assert pairs == {"keys": []}
                requests.append(copied)
        for each in requests:
            blocks.release(each)
    return outs


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("num_blocks", [40, 22])
def test_real_states(keeps: bool, num_blocks: int) -> None:
    """The results are those of the rules, with prefixes that are reused and without."""
    groups = {**GROUPS, "keys": KVCacheGroup(KEYS)}
    pool, blocks = HybridKVCache(groups, num_blocks, "cpu"), allocator(num_blocks)
    outs = served(pool, blocks, keeps)
    exact = expected(GDN, draw_layer(GDN), draw_tokens(GDN, 30, 1))
    computed = [sum(len(part.out) for part in each) for each in outs]
    assert computed[0] == 29 and (computed[1] < 29) is keeps
    for each, count in zip(outs, computed, strict=True):
        got = Results(torch.cat([p[0] for p in each]), torch.cat([p[1] for p in each]))
        rows = slice(29 - count, 29)
        assert not compare_results(GDN, got, exact, "served from a pool", rows)
    assert blocks.num_free_blocks == num_blocks - 1


SEVERAL = {
    **GROUPS,
    "window": KVCacheGroup(KEYS.replace(block_size=2, sliding_window=5)),
    "convolutions": StateGroup(KINDS["short convolution"], 1),
}
Content = tuple[str, int, tuple[int, ...]]
"""What a block holds: group, layer or place, and all tokens up to its end."""


class StateMachine(RuleBasedStateMachine):
    """Requests, checkpoints, forks, preemption and eviction. Model: what the memory of each block
    holds; a step checks what it reads, blocks of keys included, and writes what it must."""

    @initialize(blocks=st.integers(9, 24), several=st.booleans())
    def create(self, blocks: int, several: bool) -> None:
        self.size, self.groups = blocks, SEVERAL if several else GROUPS
        self.blocks = HybridBlockAllocator(self.groups, blocks)
        self.memory: dict[int, Content] = {}
        self.running: list[tuple[SequenceBlocks, list[int]]] = []

    @precondition(lambda self: len(self.running) < 4)
    @rule(prefix=st.integers(0, 1), length=st.integers(1, 24))
    def start(self, prefix: int, length: int) -> None:
        tokens = [prefix] * min(length, 13) + [prefix + 3] * max(length - 13, 0)
        one = self.blocks.start(tokens)
        assert one.num_computed % SIZE == 0 and one.num_computed < length
        assert one.num_computed <= one.num_cached_keys < length
        self.check_reads(one, tokens)
        self.running.append((one, tokens))

    def check_reads(self, one: SequenceBlocks, tokens: list[int]) -> None:
        """What the next step reads: the states, and the keys that its first token sees."""
        if not (count := one.num_computed):
            return
        for name, held in one.states.slots.items():
            for layer, block in enumerate(one.states.sources.get(name, held)):
                assert self.memory[block] == (name, layer, tuple(tokens[:count]))
        for name, group in self.blocks.groups.items():
            size = group.block_size
            for place in range(group.first_visible(count) // size, -(-count // size)):
                end = min((place + 1) * size, count)
                found = self.memory[one.blocks[name][place]]
                assert found[:2] == (name, place) and found[2][:end] == tuple(tokens[:end])

    def write(self, one: SequenceBlocks, tokens: list[int], end: int) -> None:
        """What a step writes: its slots, and the keys of its tokens."""
        held = self.held()
        for name, slots in one.states.slots.items():
            for layer, block in enumerate(slots):
                assert block != NULL_BLOCK and held[block] == 1, "a slot has one writer"
                self.memory[block] = name, layer, tuple(tokens[:end])
        for name, group in self.blocks.groups.items():
            size = group.block_size
            for place in range(one.num_computed // size, -(-end // size)):
                block = one.blocks[name][place]
                assert block != NULL_BLOCK and held[block] == 1, "a block of keys has one writer"
                self.memory[block] = name, place, tuple(tokens[: min((place + 1) * size, end)])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(0, 9), keeps=st.booleans())
    def compute(self, data: st.DataObject, more: int, keeps: bool) -> None:
        one, tokens = data.draw(st.sampled_from(self.running))
        end = min(one.num_computed + more, len(tokens))
        missing = self.blocks.num_missing_blocks(one, end)
        if missing > self.blocks.num_free_blocks:
            with pytest.raises(CacheExhaustedError):
                self.blocks.grow(one, end)
            return
        before, free = self.held(), self.blocks.num_free_blocks
        self.blocks.grow(one, end)
        assert self.blocks.num_free_blocks == free - missing
        for block in self.held() - before:
            self.memory.pop(block, None)  # evicted, or never written
        self.check_reads(one, tokens)
        written = end > one.num_computed
        if written:
            self.write(one, tokens, end)
        self.blocks.advance(one, tokens[:end])
        if keeps and written and end % SIZE == 0:
            self.blocks.keep(one)

    @precondition(lambda self: 0 < len(self.running) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        one, tokens = data.draw(st.sampled_from(self.running))
        partial = sum(one.num_computed % g.block_size > 0 for g in self.blocks.groups.values())
        if self.blocks.num_free_blocks < partial:
            with pytest.raises(CacheExhaustedError):
                self.blocks.fork(one)
            return
        copied, pairs = self.blocks.fork(one)
        assert sum(map(len, pairs.values())) == partial
        for each in pairs.values():
            for source, target in each:
                self.memory[target] = self.memory[source]
        self.check_reads(copied, tokens)
        self.running.append((copied, list(tokens)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        """The request has ended, or is preempted and starts again."""
        one, tokens = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.blocks.release(one)
        if again:
            one = self.blocks.start(tokens)
            self.check_reads(one, tokens)
            self.running.append((one, tokens))

    def held(self) -> Counter[int]:
        rows = Counter(b for one, _ in self.running for ids in one.blocks.values() for b in ids)
        del rows[NULL_BLOCK]
        for one, _ in self.running:
            for named in (one.states.slots, one.states.sources):
                rows.update(block for each in named.values() for block in each)
        return rows

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "blocks"):
            return
        held = self.held()
        for block in range(1, self.size):
            assert self.blocks.pool.ref_count(block) == held[block]
        assert self.blocks.num_free_blocks == self.size - 1 - len(held)
        keys = {b for one, _ in self.running for ids in one.blocks.values() for b in ids}
        states = {
            block
            for one, _ in self.running
            for named in (one.states.slots, one.states.sources)
            for each in named.values()
            for block in each
        }
        assert not keys & states, "T15: a block of states is in no block table"


@pytest.mark.parametrize("examples", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_random_requests(examples: int) -> None:
    bounded = settings(
        max_examples=examples,
        stateful_step_count=40,
        derandomize=True,
    )
    run_state_machine_as_test(StateMachine, settings=bounded)
