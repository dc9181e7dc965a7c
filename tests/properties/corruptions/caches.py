"""Trials of caches outside of layers: packed latents, index keys, the indexer, entries, moves."""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

import attnlib
from attnlib.cache.index_keys import IndexKeyCache
from attnlib.cache.packed_latents import PackedLatentCache
from attnlib.metadata.compressed import EntryBatch
from attnlib.ops.params import AttentionParams
from attnlib.sparse.indexer import KeyIndexer
from attnlib.sparse.key_selection import KeySelection
from tests.compat.reference import attention
from tests.properties.corruptions.reading import (
    blocks_of,
    close,
    defined,
    floats,
    ints,
    need,
    offsets,
    same,
    whole,
)
from tests.properties.corruptions.trial import Trial

POOL = 6
INT32 = (torch.int32,)


def _int32(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _batch(rng: Random, block: int) -> dict[str, Any]:
    """A batch of requests with up to two blocks."""
    lengths = [rng.randint(1, 2 * block) for _ in range(rng.randint(1, 3))]
    queries = [rng.randint(0, min(length, 2)) for length in lengths]
    ids = rng.sample(range(POOL), POOL)
    return {
        "block_table": _int32([ids[2 * i : 2 * i + 2] for i in range(len(lengths))]),
        "query_start_loc": _int32([0, *accumulate(queries)]),
        "seq_lens": _int32(lengths),
    }


def _requests(
    block_table: Any, query_start_loc: Any, seq_lens: Any, rows: int, size: int, pool: int
) -> list[tuple[slice, list[int], int]]:
    """(rows of the queries, blocks, tokens) of each request."""
    table, starts, lengths = (
        ints(block_table, 2, INT32),
        ints(query_start_loc, 1, INT32),
        ints(seq_lens, 1, INT32),
    )
    need(len(table) == len(lengths) == len(starts) - 1, "other requests")
    offsets(starts, rows)
    return [
        (slice(a, b), blocks_of(row, length, size, pool), length)
        for (a, b), row, length in zip(pairwise(starts), table, lengths, strict=True)
    ]


def _slots(slot_mapping: Any, rows: int, slots: int) -> list[tuple[int, int]]:
    """(row, slot) of everything that a write stores."""
    mapping = ints(slot_mapping, 1, (torch.int64,))
    need(len(mapping) <= rows, "fewer rows than slots")
    need(all(slot < slots for slot in mapping), "a slot past the cache")
    written = [(row, slot) for row, slot in enumerate(mapping) if slot >= 0]
    defined(len({slot for _, slot in written}) == len(written), "two rows have one slot (P4)")
    return written


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    """Real values `[..., 576]` of packed latents, byte by byte."""
    flat = data.reshape(-1, 656)
    latent = flat[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = torch.tensor(
        [struct.unpack("<4f", bytes(row[512:528].tolist())) for row in flat], dtype=torch.float64
    ).view(-1, 4)
    rotary = flat[:, 528:].contiguous().view(torch.bfloat16).double()
    whole_latent = latent * scales.repeat_interleave(128, 1)
    return torch.cat([whole_latent, rotary], 1).view(*data.shape[:-1], 576)


def latents_write(rng: Random) -> Trial:
    """`PackedLatentCache.write`."""
    rows = rng.randint(0, 3)
    slots = rng.sample(range(POOL * 2), rows)
    mapping = torch.tensor([slot if rng.random() < 0.8 else -1 for slot in slots]).long()

    def reference(data: Any, latents: Any, slot_mapping: Any) -> None:
        need(data.dtype == torch.uint8 and data.dim() == 3 and data.shape[2] == 656, "no cache")
        floats(latents, None, 576)
        need(latents.dtype != torch.float64, "another dtype")
        flat = data.flatten(0, 1)
        for row, slot in _slots(slot_mapping, len(latents), len(flat)):
            values = latents[row].float()
            for group in range(4):
                part = values[128 * group : 128 * group + 128]
                scale = max(float(part.abs().max() / torch.tensor(448.0)), 2.0**-126)
                stored = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                flat[slot, 128 * group : 128 * group + 128] = stored.view(torch.uint8)
                packed = torch.tensor(list(struct.pack("<f", scale)), dtype=torch.uint8)
                flat[slot, 512 + 4 * group : 516 + 4 * group] = packed
            flat[slot, 528:] = values[512:].to(torch.bfloat16).view(torch.uint8)

    return Trial(
        "PackedLatentCache.write",
        {"latents": torch.randn(rows + rng.choice([0, 1]), 576), "slot_mapping": mapping},
        {"data": torch.zeros(POOL, 2, 656, dtype=torch.uint8)},
        lambda data, latents, slot_mapping: PackedLatentCache(data).write(latents, slot_mapping),
        reference,
    )


def latents_attend(rng: Random) -> Trial:
    """`PackedLatentCache.attend`."""
    batch = _batch(rng, 2)
    cache = PackedLatentCache.allocate(POOL, 2, "cpu")
    cache.write(torch.randn(2 * POOL, 576), torch.arange(2 * POOL))
    batch["query"] = torch.randn(int(batch["query_start_loc"][-1]) + rng.choice([0, 1]), 3, 576)
    batch["max_seq_len"] = int(batch["seq_lens"].max())

    def call(data: Any, **given: Any) -> Any:
        params = AttentionParams(scale=0.05, causal=True)
        return PackedLatentCache(data).attend(params=params, max_query_len=2, **given)

    def reference(
        data: Any, query: Any, block_table: Any, query_start_loc: Any, seq_lens: Any,
        max_seq_len: Any,
    ) -> Any:  # fmt: skip
        need(data.dtype == torch.uint8 and data.dim() == 3 and data.shape[2] == 656, "no cache")
        floats(query, None, None, 576)
        need(query.dtype != torch.float64, "another dtype")
        need(max_seq_len == whole(max_seq_len), "no bound")
        found = _requests(block_table, query_start_loc, seq_lens, len(query), data.shape[1],
                          len(data))  # fmt: skip
        need(all(length <= max_seq_len for _, _, length in found), "past the bound")
        out = torch.zeros(*query.shape[:2], 512, dtype=torch.float64)
        for rows, blocks, length in found:
            if rows.stop > rows.start and length:
                keys = _unpacked(data[blocks]).flatten(0, 1)[:length, None]
                state = attention(query[rows], keys, keys[..., :512], scale=0.05, causal=True)
                out[rows] = state[0].nan_to_num(0.0)
        return out

    def compare(got: Any, wanted: Any) -> None:
        close(got, wanted, 3e-5 if got.dtype == torch.float32 else 3e-2)

    return Trial("PackedLatentCache.attend", batch, {"data": cache.data}, call, reference,
                 same_result=compare)  # fmt: skip


def index_keys(rng: Random) -> Trial:
    """`IndexKeyCache.write`."""
    rows = rng.randint(0, 3)
    slots = torch.tensor(rng.sample(range(POOL * 2), rows)).long()

    def reference(stored: Any, keys: Any, slot_mapping: Any) -> None:
        floats(stored, None, None, None)
        floats(keys, None, stored.shape[2])
        for row, slot in _slots(slot_mapping, len(keys), len(stored) * stored.shape[1]):
            stored[slot // stored.shape[1], slot % stored.shape[1]] = keys[row].float()

    return Trial(
        "IndexKeyCache.write",
        {"keys": torch.randn(rows + rng.choice([0, 1]), 8), "slot_mapping": slots},
        {"stored": torch.randn(POOL, 2, 8)},
        lambda stored, keys, slot_mapping: IndexKeyCache(stored).write(keys, slot_mapping),
        reference,
    )


def indexer(rng: Random) -> Trial:
    """`KeyIndexer` over a batch: new keys are written, and the best keys selected."""
    batch = _batch(rng, 2)
    tokens = int(batch["query_start_loc"][-1])
    slots = rng.sample(range(2 * POOL), tokens)
    batch |= {
        "query": torch.randn(tokens, 2, 8), "weights": torch.randn(tokens, 2),
        "key": torch.randn(tokens, 8), "slot_mapping": torch.tensor(slots).long(),
    }  # fmt: skip

    def call(stored: Any, query: Any, weights: Any, key: Any, **metadata: Any) -> Any:
        given = SimpleNamespace(
            num_actual_tokens=tokens, max_query_len=2, max_seq_len=4, query_start_loc_cpu=None,
            seq_lens_cpu=None, **metadata,
        )  # fmt: skip
        lists = KeyIndexer(KeySelection(max_blocks=2))(
            query, weights, key, IndexKeyCache(stored), given
        )
        return lists.indices

    def reference(
        stored: Any, query: Any, weights: Any, key: Any, block_table: Any, query_start_loc: Any,
        seq_lens: Any, slot_mapping: Any,
    ) -> Any:  # fmt: skip
        floats(stored, None, None, None)
        size = stored.shape[1]
        floats(query, None, None, stored.shape[2])
        floats(weights, *query.shape[:2])
        floats(key, None, stored.shape[2])
        need(weights.dtype == torch.float32 and len(query) >= tokens, "other queries")
        found = _requests(block_table, query_start_loc, seq_lens, len(query), size, len(stored))
        for row, slot in _slots(slot_mapping, len(key), len(stored) * size):
            stored[slot // size, slot % size] = key[row].float()
        lists = torch.full((len(query), 1, 2), -1, dtype=torch.int32)
        for rows, blocks, length in found:
            keys = stored[blocks].flatten(0, 1)[:length].float()
            for row in range(rows.start, rows.stop):
                position = length - (rows.stop - row)
                scores = (query[row].float() @ keys.T).clamp(min=0) * weights[row][:, None]
                ranked = scores.sum(0)[: max(position + 1, 0)].sort(descending=True, stable=True)
                best = sorted(ranked.indices[:2].tolist())
                lists[row, 0, : len(best)] = torch.tensor(best, dtype=torch.int32)
        return lists.tolist()

    return Trial("KeyIndexer", batch, {"stored": torch.randn(POOL, 2, 8)}, call, reference,
                 same_result=same)  # fmt: skip


def entries(rng: Random) -> Trial:
    """`EntryBatch.build`."""
    batch = _batch(rng, 4)
    queries = batch.pop("query_start_loc").diff().tolist()
    lengths = batch.pop("seq_lens").tolist()
    common = attnlib.CommonAttentionMetadata.from_lengths(
        queries, lengths, [[0, 1]] * len(lengths), 4, "cpu"
    )
    batch["compress_rate"] = rng.choice([1, 2, 3])

    def call(block_table: Any, compress_rate: Any) -> Any:
        built = EntryBatch.build(common, block_table, compress_rate)
        return built.num_entries, built.block_table

    def reference(block_table: Any, compress_rate: Any) -> Any:
        rate, table = whole(compress_rate, 1), ints(block_table, 2, INT32)
        need(len(table) == len(lengths), "other requests")
        counts, rows = [], []
        for query, length, row in zip(queries, lengths, table, strict=True):
            for position in range(length - query, length):
                counts.append((position + 1) // rate)
                rows.append(row)
        return counts, rows

    return Trial("EntryBatch.build", batch, {}, call, reference, same_result=same)


def moves(rng: Random) -> Trial:
    """`copy_blocks` and `zero_blocks`."""
    count = rng.randint(0, 3)
    pairs = list(
        zip(rng.choices(range(POOL), k=count), rng.sample(range(POOL), count), strict=True)
    )
    given: Any = pairs if rng.random() < 0.5 or not count else torch.tensor(pairs)
    zeroed = rng.sample(range(POOL), rng.randint(0, 2))

    def call(key_cache: Any, value_cache: Any, pairs: Any, zeroed: Any) -> None:
        cache = attnlib.PagedKVCache.from_views(key_cache, value_cache)
        first = [cache.key_cache.clone(), cache.value_cache.clone()]
        cache.copy_blocks(pairs)
        try:
            cache.zero_blocks(zeroed)
        except attnlib.errors.ContractError:
            cache.key_cache.copy_(first[0])  # the trial is one call, of which nothing may remain
            cache.value_cache.copy_(first[1])
            raise

    def reference(key_cache: Any, value_cache: Any, pairs: Any, zeroed: Any) -> None:
        floats(key_cache, None, None, None, None)
        floats(value_cache, *key_cache.shape[:3], None)
        if isinstance(pairs, torch.Tensor):
            integers = not (pairs.is_floating_point() or pairs.dtype == torch.bool)
            need(integers and (pairs.dim() == 2 or not pairs.numel()), "no integers")
            pairs = pairs.tolist()
        for one in pairs:
            need(isinstance(one, tuple | list) and len(one) == 2, "no pair")
        for block in [block for one in pairs for block in one] + list(zeroed):
            need(isinstance(block, int) and not isinstance(block, bool), "no integer")
            need(0 <= block < len(key_cache), "no such block")
        targets = [target for _, target in pairs]
        need(len(set(targets)) == len(targets), "a target twice")
        for view in (key_cache, value_cache):
            copied = view.clone()
            for source, target in pairs:
                view[target] = copied[source]
            for block in zeroed:
                view[block] = 0

    memory = {name: torch.randn(POOL, 2, 2, 4) for name in ("key_cache", "value_cache")}
    return Trial("block moves", {"pairs": given, "zeroed": zeroed}, memory, call, reference)


TRIALS = (latents_write, latents_attend, index_keys, indexer, entries, moves)
