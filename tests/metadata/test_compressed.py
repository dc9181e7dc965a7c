"""Compressed entries of a batch and of a call: counts, checks before launches, one softmax."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attnlib import Attention, AttentionSpec, CommonAttentionMetadata, PagedKVCache, explain
from attnlib.cache.index_keys import IndexKeyCache
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.metadata.compressed import CompressedKeys, EntryBatch
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.indexer import KeyIndexer
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

ENTRIES = CompressedEntries(compress_rate=4, block_size=2)
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=1, head_size=64, dtype=torch.float32, use_mla=True,
    sliding_window=8, has_sink=True, needs_lse=True, compressed_entries=ENTRIES,
)  # fmt: skip
QUERY_LENS, SEQ_LENS, BLOCKS = [1, 3, 0, 5], [40, 20, 9, 5], [[4, 0, 6], [2, 5], [7], [1]]
TABLE = torch.arange(4 * 6, dtype=torch.int32).view(4, 6)


def _common() -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(QUERY_LENS, SEQ_LENS, BLOCKS, 16, "cpu")


def _call(spec: AttentionSpec = SPEC) -> dict[str, Any]:
    """The arguments of a call without entries."""
    torch.manual_seed(0)
    layer = Attention(spec, backend="torch", device="cpu", sinks=torch.randn(4))
    cache = PagedKVCache.allocate(spec, 8, "cpu")
    cache.key_cache.normal_()
    key = torch.randn(9, 1, 64)
    return {
        "layer": layer, "query": torch.randn(9, 4, 64), "key": key, "value": key, "cache": cache,
        "metadata": layer.backend.make_builder(spec, "cpu").build(0, _common()),
    }  # fmt: skip


def _run(call: dict[str, Any], **arguments: Any) -> Any:
    tensors = [call[name] for name in ("query", "key", "value", "cache", "metadata")]
    return call["layer"](*tensors, **arguments)


def _entries(num_blocks: int = 24, block_size: int = 2) -> PagedKVCache:
    plain = SPEC.replace(compressed_entries=None, block_size=block_size)
    cache = PagedKVCache.allocate(plain, num_blocks, "cpu")
    cache.key_cache.normal_()
    return cache


def _batch(rate: int = 4) -> EntryBatch:
    return EntryBatch.build(_common(), TABLE, rate)


def test_each_query_sees_the_complete_entries() -> None:
    batch = _batch()
    # Positions 39; 17, 18, 19; 0 to 4.
    assert batch.num_entries.tolist() == [10, 4, 4, 5, 0, 0, 0, 1, 1]
    assert batch.block_table[:, 0].tolist() == [0, 6, 6, 6, 18, 18, 18, 18, 18]
    assert batch.max_entries == 10
    padded = dataclasses.replace(_common(), num_actual_tokens=11)
    assert EntryBatch.build(padded, TABLE, 4).num_entries.tolist()[9:] == [0, 0]
    empty = CommonAttentionMetadata.from_lengths([], [], [], 16, "cpu")
    assert EntryBatch.build(empty, TABLE[:0], 4).num_entries.shape == (0,)


@pytest.mark.parametrize("selection", [None, KeySelection(max_blocks=3)])
def test_one_softmax_over_both_streams(selection: KeySelection | None) -> None:
    """Against a softmax over the concatenation of sink, own keys and entries, token by token."""
    spec = SPEC.replace(compressed_entries=dataclasses.replace(ENTRIES, selection=selection))
    call, entries = _call(spec), _entries()
    lists = torch.tensor([[0, 3, 7], [4, 9, -1], [-1, -1, -1]] * 3, dtype=torch.int32)[:, None]
    selected = None if selection is None else SelectedKeys(lists)
    out, lse = _run(
        call, return_lse=True, compressed_keys=CompressedKeys(entries, _batch(), selected)
    )
    token = 0
    for request, (count, length) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
        for p in range(length - count, length):
            keys = [
                call["cache"].key_cache[BLOCKS[request][k // 16], k % 16, 0]
                for k in range(max(0, p - 7), p + 1)
            ]
            chosen = range((p + 1) // 4)
            if selection is not None:
                chosen = [e for e in chosen if e in lists[token, 0].tolist()]
            keys += [entries.key_cache[TABLE[request, e // 2], e % 2, 0] for e in chosen]
            rows = torch.stack(keys)
            scores = call["query"][token] @ rows.T / 8
            logits = torch.cat([call["layer"].sinks[:, None], scores], dim=1)
            expected = logits.softmax(dim=1)[:, 1:] @ rows
            torch.testing.assert_close(out[token], expected, rtol=0, atol=2e-6)
            torch.testing.assert_close(lse[token], logits.logsumexp(1), rtol=0, atol=2e-6)
            token += 1


def test_an_indexer_selects_entries() -> None:
    """M14 over entries: the best visible ones by their index keys, for each query token."""
    selection, batch = KeySelection(max_blocks=3), _batch()
    draw = torch.Generator().manual_seed(0)
    keys, query = (torch.randn(*shape, generator=draw) for shape in ((24, 2, 16), (9, 2, 16)))
    weights = torch.rand(9, 2, generator=draw)
    cache = IndexKeyCache(keys)
    found = KeyIndexer(selection)(query, weights, None, cache, batch).indices
    assert found.shape == (9, 1, 3)
    for token, count in enumerate(batch.num_entries.tolist()):
        rows = keys[batch.block_table[token].long()].flatten(0, 1)[:count]
        scores = (weights[token][:, None] * (query[token] @ rows.T).relu()).sum(0)
        best = sorted(scores.topk(min(3, count)).indices.tolist())
        assert found[token, 0].tolist() == best + [-1] * (3 - len(best))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: None, "compressed_keys is missing"),
        (lambda: CompressedKeys(_entries(block_size=4), _batch()), r"\(4, 1, 64, 64"),
        (lambda: CompressedKeys(_entries(), _batch(rate=2)), "compress_rate=2, the spec 4"),
        (
            lambda: CompressedKeys(_entries(), _batch(), SelectedKeys(torch.zeros(9, 1, 1).int())),
            "selected entries are given",
        ),
        (
            lambda: CompressedKeys(
                _entries(), dataclasses.replace(_batch(), num_entries=torch.zeros(3).int())
            ),
            "has 3 tokens on cpu, the layer's batch 9",
        ),
        (
            lambda: CompressedKeys(
                PagedKVCache.from_views(
                    torch.zeros(24, 2, 1, 64), torch.zeros(24, 2, 1, 64)
                ),
                _batch(),
            ),
            "memory of their own",
        ),
    ],
)  # fmt: skip
def test_wrong_entries_are_refused_before_a_write(given: Any, message: str) -> None:
    call = _call()
    before = call["cache"].key_cache.clone()
    with pytest.raises(ContractError, match=message):
        _run(call, compressed_keys=given())
    assert torch.equal(call["cache"].key_cache, before)


def test_layers_without_entries_refuse_them() -> None:
    call = _call(SPEC.replace(compressed_entries=None))
    with pytest.raises(ContractError, match="compressed_keys is given"):
        _run(call, compressed_keys=CompressedKeys(_entries(), _batch()))
    lists = SelectedKeys(torch.zeros(9, 1, 1, dtype=torch.int32))
    with pytest.raises(ContractError, match="both given"):
        _run(call, compressed_keys=CompressedKeys(_entries(), _batch()), selected_keys=lists)
    with pytest.raises(ContractError, match="got a SelectedKeys"):
        _run(_call(), selected_keys=lists)


def test_blocks_of_entries_outside_of_their_cache_are_refused() -> None:
    """P3, by default on a CPU: before the new keys are written."""
    call = _call()
    before = call["cache"].key_cache.clone()
    with pytest.raises(ContractError, match=r"block_table\[0\]\[3\]=3 is outside the pool of 3"):
        _run(call, compressed_keys=CompressedKeys(_entries(num_blocks=3), _batch()))
    assert torch.equal(call["cache"].key_cache, before)
    with pytest.raises(ContractError, match="compress_rate=0 must be at least 1"):
        EntryBatch.build(
            CommonAttentionMetadata.from_lengths([1], [9], [[0]], 16, "cpu"),
            torch.zeros(1, 4, dtype=torch.int32),
            0,
        )


def test_values_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATTNLIB_VALIDATE=1 names blocks outside the cache and repeated entries."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    with pytest.raises(ContractError, match=r"block_table\[0\]\[3\]=3 is outside the pool of 3"):
        _run(_call(), compressed_keys=CompressedKeys(_entries(num_blocks=3), _batch()))
    few = dataclasses.replace(_batch(), max_entries=9)
    with pytest.raises(ContractError, match="sees 10 entries, but max_entries=9"):
        _run(_call(), compressed_keys=CompressedKeys(_entries(), few))
    spec = SPEC.replace(
        compressed_entries=dataclasses.replace(ENTRIES, selection=KeySelection(max_blocks=2))
    )
    lists = SelectedKeys(torch.ones(9, 1, 2, dtype=torch.int32))
    with pytest.raises(ContractError, match="entry 1 twice"):
        _run(_call(spec), compressed_keys=CompressedKeys(_entries(), _batch(), lists))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_selection": KeySelection(max_blocks=2)}, "key_selection="),
        ({"mask_kind": "bidirectional"}, "mask_kind=bidirectional"),
        ({"has_alibi": True}, "has_alibi"),
        ({"compressed_entries": 4}, "is a int"),
    ],
)
def test_specs_that_no_layer_can_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        SPEC.replace(**changes)


def test_forms_of_entries() -> None:
    assert CompressedEntries.parse("4:64:512") == CompressedEntries(
        compress_rate=4, selection=KeySelection(max_blocks=512)
    )
    assert str(CompressedEntries.parse("128:16")) == "all entries of 128 tokens"
    for text in ("4", "4:a", "4:64:1:1"):
        with pytest.raises(ContractError, match="RATE:BLOCK_SIZE"):
            CompressedEntries.parse(text)
    with pytest.raises(ContractError, match="compress_rate=0"):
        CompressedEntries(compress_rate=0)
    with pytest.raises(ContractError, match="must be 1"):
        CompressedEntries(compress_rate=4, selection=KeySelection(max_blocks=2, block_size=4))


def test_support_and_explain() -> None:
    """Backends without the capability refuse; explain names the kernels of the entries."""
    report = explain(SPEC.replace(dtype=torch.bfloat16), device="sm_90")
    assert report.chosen == "triton"
    assert "merged by the LSE, the sink counts once" in " ".join(str(report).split())
    with pytest.raises(UnsupportedConfigError, match="batch_invariant"):
        Attention(SPEC.replace(batch_invariant=True), backend="torch", device="cpu")


def test_objects_of_other_types_are_refused() -> None:
    common = CommonAttentionMetadata.from_lengths([1], [4], [[0]], 16, "cpu")
    table = torch.zeros(1, 1, dtype=torch.int32)
    wrong: Any = [[0]]
    for given, message in (
        ((wrong, table), "common_attn_metadata is a list"),
        ((common, wrong), "block_table of the entries is a list"),
    ):
        with pytest.raises(ContractError, match=message):
            EntryBatch.build(*given, compress_rate=2)
    spec = AttentionSpec(num_heads=2, head_size=16, dtype=torch.float32)
    cache, batch = PagedKVCache.allocate(spec, 2, "cpu"), EntryBatch.build(common, table, 2)
    for given, name in (
        ((None, batch, None), "cache"),
        ((cache, common, None), "batch"),
        ((cache, batch, wrong), "selected"),
    ):
        with pytest.raises(ContractError, match=f"{name} of the compressed keys is a"):
            CompressedKeys(*given)
    with pytest.raises(ContractError, match="selection=.* must be a KeySelection or None"):
        CompressedEntries(compress_rate=2, selection=wrong)
