"""Cascades: prefixes computed once give the attention over all keys."""

from __future__ import annotations

import copy
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.cascade.batches import _to_device
from attnlib.backends.cascade.schedule import EVERY_PREFIX, PrefixRule, prefix_parts
from attnlib.backends.torch.metadata import TorchMetadataBuilder
from attnlib.errors import ContractError
from attnlib.metadata.shared_prefix import SharedPrefix, find_shared_prefixes
from attnlib.selection import merge_attention
from attnlib.spec import Window
from attnlib.testing import run_conformance

SHARED = replace(EVERY_PREFIX, max_decode_parts=2)
PAIRS = ("prefix:torch,suffix:torch", "prefix:triton,suffix:triton", "prefix:triton,suffix:torch")


def _spec(**changes: Any) -> attnlib.AttentionSpec:
    values: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32, "block_size": 4,
    }  # fmt: skip
    return attnlib.AttentionSpec(**(values | changes))


class Forest:
    """A batch of requests whose block tables are paths in random trees.

    Args:
        seed: of the random choices.
        decode: one new token for each request, else up to seven.
        spec: of the layer.
    """

    def __init__(self, seed: int, spec: attnlib.AttentionSpec, decode: bool) -> None:
        draw = random.Random(seed)
        self.spec, block = spec, spec.block_size
        self.num_blocks = 1
        paths: list[list[int]] = [[]]
        for _ in range(draw.randint(1, 6)):  # nodes; a level may be empty
            paths.append(draw.choice(paths[-2:]) + self._blocks(draw.randint(0, 3)))
        rows, queries, lengths = [], [], []
        for _ in range(draw.choice([1, 2, 4, 6, 9])):
            path = draw.choice(paths)
            # A prefix may end inside of its last block; its other tokens are then shared too.
            context = max(0, len(path) * block - draw.choice([0, 0, 1, block - 1]))
            own = draw.randint(0, 6) if context == len(path) * block else 0
            query = 1 if decode else draw.randint(0, 7)
            total = context + own + query
            # New tokens go to blocks of the request alone.
            kept = path[: (context + own) // block] if own == 0 else path
            rows.append(kept + self._blocks(-(-total // block) - len(kept)))
            queries.append(query)
            lengths.append(total)
        torch.manual_seed(seed)
        self.common = attnlib.CommonAttentionMetadata.from_lengths(
            queries, lengths, rows, block, "cpu"
        )
        self.cache = attnlib.PagedKVCache.allocate(spec, self.num_blocks, "cpu")
        for part in (self.cache.key_cache, self.cache.value_cache):
            part.copy_(torch.randn(part.shape).to(part.dtype))
        tokens = sum(queries)
        self.rows = [
            torch.randn(tokens, heads, spec.head_size).to(spec.dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        ]
        self.sinks = torch.randn(spec.num_heads) if spec.has_sink else None

    def _blocks(self, count: int) -> list[int]:
        first = self.num_blocks
        self.num_blocks += max(0, count)
        return list(range(first, self.num_blocks))

    def run(self, backend: str, rule: PrefixRule = SHARED) -> tuple[Any, Any, Any, Any]:
        """(output, LSE, cache after the call, metadata) of a backend."""
        cls: Any = attnlib.get_attn_backend(self.spec, backend, "cpu")
        if backend in PAIRS:
            cls = merge_attention(cls.prefix_backend, cls.suffix_backend, rule)
        layer = attnlib.Attention(self.spec, backend=cls, device="cpu", sinks=self.sinks)
        builder = cls.make_builder(self.spec, "cpu")
        cache = copy.deepcopy(self.cache)
        metadata = builder.build(0, self.common)
        layer(*self.rows, cache, metadata)  # the second call repeats the plan
        output, lse = layer(*self.rows, cache, metadata, return_lse=True)
        return output, lse, cache, metadata


@pytest.mark.parametrize("decode", [True, False], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    "backend", [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[1:])]
)
def test_random_forests_equal_flat_attention(backend: str, decode: bool) -> None:
    """M13: empty levels, one request, prefixes that end inside a block, any number of levels."""
    shared = 0
    for seed in range(4 if "triton" in backend else 16):
        forest = Forest(seed, _spec(has_sink=seed % 3 == 0, needs_lse=True), decode)
        want, want_lse, cache, _ = forest.run("torch")
        got, lse, written, metadata = forest.run(backend)
        shared += metadata.prefix is not None
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5)
        assert torch.equal(cache.key_cache, written.key_cache)
        assert torch.equal(cache.value_cache, written.value_cache)
    assert shared >= 2, "the forests share too little for this test"


@pytest.mark.parametrize("seed", [0, 1, 7, 9, 10, 17, 29, 58])
@pytest.mark.parametrize("heads", [4, 32], ids=["few-rows", "many-rows"])
def test_decodes_of_random_forests_as_items(
    seed: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M13: prefixes and suffixes as the work items of one kernel, in few and in many ranges."""
    shape = ((8, 1), (4, 3), (1, 7), (1, 50))[seed % 4]
    monkeypatch.setattr(TorchMetadataBuilder, "shared_decode_shape", property(lambda self: shape))
    cap = 5.0 if seed % 2 else None
    spec = _spec(num_heads=heads, has_sink=seed < 10, needs_lse=True, logits_soft_cap=cap)
    forest = Forest(seed, spec, decode=True)
    want, want_lse, cache, _ = forest.run("torch")
    got, lse, written, metadata = forest.run(PAIRS[0])
    assert metadata.items is not None and metadata.prefix is None
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.key_cache, written.key_cache)
    assert torch.equal(cache.value_cache, written.value_cache)


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["float16", "fp8_e4m3"])
def test_half_precision_and_quantized_caches(kv_cache_dtype: str) -> None:
    """M9, M13: the prefix backend reads the cache with the same scales."""
    spec = _spec(dtype=torch.float16, kv_cache_dtype=kv_cache_dtype, logits_soft_cap=20.0)
    forest = Forest(3, spec, decode=True)
    want, *_ = forest.run("torch")
    got, *_, metadata = forest.run(PAIRS[1])
    assert metadata.prefix is not None
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 8}, "sliding window"),
        ({"attention_chunk_size": 8}, "attention chunks"),
        ({"window": Window(None, 0)}, "sliding window"),
    ],
)
def test_layers_without_shared_prefixes(changes: dict[str, Any], reason: str) -> None:
    """A layer whose mask depends on the query's position runs the suffix backend alone."""
    forest = Forest(3, _spec(**changes), decode=True)
    want, *_ = forest.run("torch")
    got, *_, metadata = forest.run(PAIRS[0])
    assert metadata.prefix is None
    assert torch.equal(got, want)
    assert reason in str(attnlib.explain(forest.spec, device="cpu", backend=PAIRS[0]))


@pytest.mark.slow
def test_the_conformance_suite_passes() -> None:
    """Every rule holds, with every prefix that batches of the suite share computed once."""
    backend = merge_attention("torch", "torch", SHARED)
    report = run_conformance(backend, device="cpu", quick=True)
    assert report.passed, str(report)


@pytest.mark.parametrize("shape", [None, (4, 3)], ids=["two-launches", "one-kernel"])
def test_a_prefix_that_saves_too_little_is_not_shared(
    shape: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule counts the bytes that are not read again, and the tokens whose results are merged.

    The forest has 9 requests and saves 36 tokens of 256 bytes.
    """
    saved = 36 * 256
    monkeypatch.setattr(TorchMetadataBuilder, "shared_decode_shape", property(lambda self: shape))
    forest = Forest(3, _spec(), decode=True)
    rules = [
        replace(EVERY_PREFIX, min_saved_bytes=saved + 1),
        replace(EVERY_PREFIX, min_saved_bytes_per_token=saved // 8),
        replace(EVERY_PREFIX, min_saved_bytes_of_decodes=saved + 1),
        replace(EVERY_PREFIX, min_saved_bytes_per_decode=saved // 8),
    ]
    shared = []
    for rule in (EVERY_PREFIX, *rules, PrefixRule()):
        *_, metadata = forest.run(PAIRS[0], rule)
        shared.append(bool(metadata.shared_prefixes))
        assert metadata.shared_prefixes or (metadata.prefix is None and metadata.items is None)
    assert shared == [
        True,
        *([True, True, False, False] if shape else [False, False, True, True]),
        False,
    ]


def test_the_default_rule_shares_decodes_that_were_measured_to_be_faster() -> None:
    """Rows of `benchmarks/gpu/shared_prefix.py` that one kernel computes."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "shared_prefix.json"
    rows = [row for row in json.loads(results.read_text())["rows"] if row["query"] == 1]
    decisions = set()
    for row in rows:
        shared = row["saved_mib"] * 2**20 >= PrefixRule().least(row["requests"], one_kernel=True)
        assert row["speedup"] >= 1 if shared else row["speedup"] < 1.02, row
        decisions.add(shared)
    assert decisions == {True, False}


def test_wrong_prefixes_are_refused_before_anything_is_written() -> None:
    """M13."""
    forest = Forest(3, _spec(), decode=True)
    forest.common = forest.common.replace(shared_prefixes=[SharedPrefix((0, 1), 0, 4096)])
    with pytest.raises(ContractError, match="ends past"):
        forest.run(PAIRS[0])


def test_a_common_prefix_length() -> None:
    """vLLM's argument of `build` states one prefix; it is cut to whole blocks of the context."""
    spec = _spec()
    backend = merge_attention("torch", "torch", SHARED)
    builder: Any = backend.make_builder(spec, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 1], [12, 14], [[1, 2, 3], [1, 2, 4, 5]], 4, "cpu"
    )
    chosen = builder._choose(11, common.replace(shared_prefixes=None))
    assert chosen == [SharedPrefix((0, 1), 0, 8)]
    assert builder.use_cascade_attention(8, [1, 1], 4, 2, False, False, 132)
    assert not builder.use_cascade_attention(3, [1, 1], 4, 2, False, False, 132)


def test_names_classes_and_pickles() -> None:
    """S1: a pair by name is the class that `merge_attention` returns, also in another process."""
    backend = merge_attention("triton", "torch")
    assert backend.get_name() == "prefix:triton,suffix:torch"
    assert backend is attnlib.get_attn_backend(_spec(), backend.get_name(), "cpu")
    assert pickle.loads(pickle.dumps(backend)) is backend
    builder = backend.get_builder_cls()
    assert pickle.loads(pickle.dumps(builder)) is builder
    for text in ("prefix:torch", "prefix:torch,decode:torch", "prefix:torch,suffix:nothing"):
        with pytest.raises(attnlib.errors.UnknownBackendError):
            attnlib.get_attn_backend(_spec(), text, "cpu")


def test_metadata_drops_plans_and_refuses_computed_fields() -> None:
    """D10: fields from which others were computed cannot be assigned."""
    *_, metadata = Forest(3, _spec(), decode=True).run(PAIRS[0])
    with pytest.raises(ContractError, match="cannot be assigned"):
        metadata.seq_lens = metadata.seq_lens + 1
    with pytest.raises(ContractError, match="build the batch again"):
        builder: Any = merge_attention("torch", "torch").make_builder(_spec(), "cpu")
        builder.update_block_table(metadata, metadata.block_table, metadata.slot_mapping)
    assert not pickle.loads(pickle.dumps(metadata)).plans


def test_parts_of_decodes_are_split_by_requests() -> None:
    """Decode kernels take few rows; every part then covers all tokens of the prefix."""
    spec = _spec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16)
    prefixes = [SharedPrefix(tuple(range(40)), 0, 8192), SharedPrefix((0, 1), 8192, 8208)]
    parts = prefix_parts(prefixes, [1] * 40, spec, 132, PrefixRule(max_decode_parts=8), 16)
    assert [(part.requests, part.start, part.end) for part in parts] == [
        ((0, 1), 8192, 8208),
        (tuple(range(32, 40)), 0, 8192),
        (tuple(range(16)), 0, 8192),
        (tuple(range(16, 32)), 0, 8192),
    ]


def test_parts_of_prefills_fill_the_multiprocessors() -> None:
    """A prefix of many rows is split by its tokens, at block boundaries."""
    spec = _spec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16)
    prefixes = [SharedPrefix((0, 1), 0, 8192)]
    parts = prefix_parts(prefixes, [40, 40], spec, 132, PrefixRule(), 16)
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert (parts[0].start, parts[-1].end) == (0, 8192)
    assert 2 <= len(parts) <= 16 and all(part.end % 16 == 0 for part in parts)
    assert len(prefix_parts(prefixes, [40, 40], spec, 0, PrefixRule(), 16)) == 1


def test_parts_of_a_prefix_fit_the_multiprocessors() -> None:
    """One thread block more than there are multiprocessors would take twice the time."""
    spec = _spec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16)
    for requests, tokens in ((16, 32768), (64, 8192), (40, 5000 // 16 * 16)):
        prefix = SharedPrefix(tuple(range(requests)), 0, tokens)
        parts = prefix_parts(
            [prefix], [1] * requests, spec, 132, PrefixRule(max_decode_parts=0), 16
        )  # fmt: skip
        blocks = len(parts) * 8 * -(-requests * 4 // 128)
        assert 100 < blocks <= 132, (requests, blocks)
        assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
        assert parts[-1].end == tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("earlier", [(), (0, 1)], ids=["nothing shared", "other rows"])
def test_batches_whose_calls_look_the_same(earlier: tuple[int, ...]) -> None:
    """M13: an earlier batch had no LSEs of suffixes, or its prefixes read rows of the batch in
    place."""
    outs = []
    for backend in ("torch", PAIRS[1]):
        cls: Any = attnlib.get_attn_backend(_spec(), backend, "cpu")
        if backend in PAIRS:
            cls = merge_attention(cls.prefix_backend, cls.suffix_backend, SHARED)
        layer = attnlib.Attention(_spec(), backend=cls, device="cpu")
        builder = cls.make_builder(_spec(), "cpu")
        cache = attnlib.PagedKVCache.allocate(_spec(), 200, "cpu")
        torch.manual_seed(3)
        cache.key_cache.normal_()
        cache.value_cache.normal_()
        for requests, own in ((earlier, 0), ((0, 2), 0), ((0, 2), 3)):
            table = torch.arange(96, dtype=torch.int32).view(3, 32) + own * 32
            table[list(requests), :8] = torch.arange(8, dtype=torch.int32) + 190
            lengths = [80 + 32 * (number in requests) for number in range(3)]
            common = attnlib.CommonAttentionMetadata.from_lengths(
                [1] * 3, lengths, table, 4, "cpu", max_seq_len=112
            )
            if requests:
                common = common.replace(shared_prefixes=(SharedPrefix(requests, 0, 32),))
            rows = torch.randn(3, 8, 16).split([4, 2, 2], dim=1)  # fused: q has other strides
            outs.append(layer(*rows, cache, builder.build(0, common)))
    for expected, found in zip(outs[:3], outs[3:], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_prefixes_of_a_batch_on_the_host() -> None:
    """The engine's path on a GPU: find the prefixes in the host's block table, then state them."""
    forest = Forest(3, _spec(), decode=True)
    common = forest.common
    assert common.block_table_tensor is not None and common.seq_lens_cpu is not None
    context = common.seq_lens_cpu - common.query_lens_cpu
    found = find_shared_prefixes(common.block_table_tensor, context, 4)
    *_, metadata = forest.run(PAIRS[0])
    assert metadata.shared_prefixes == tuple(found)


def test_warmup_runs_the_kernels_of_prefixes() -> None:
    """Batches with a shared prefix of few and of many query rows; the cache stays as it is."""
    limits = attnlib.BatchLimits(max_num_reqs=5, max_num_tokens=16, max_seq_len=24)
    spec = _spec()
    cls: Any = attnlib.get_attn_backend(spec, PAIRS[0], "cpu")
    builder = cls.make_builder(spec, "cpu", limits=limits)
    batches = list(builder.warmup_metadata(limits))
    shapes = {(len(metadata.shared_prefixes[0].requests), tokens) for metadata, tokens in batches}
    assert shapes == {
        (count, count * query)
        for count in (2, 4, 5)
        for query in range(1, 9)
        if count * query <= 16
    }
    assert all(metadata.prefix is not None for metadata, _ in batches)
    assert {metadata.shared_prefixes[0].end for metadata, _ in batches} == {4, 20, 16}
    cache = attnlib.PagedKVCache.allocate(spec, 6, "cpu")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    before = cache.key_cache.clone(), cache.value_cache.clone()
    layer = attnlib.Attention(spec, backend=cls, device="cpu")
    seen: list[Any] = []
    merge = cls.get_impl_cls().prefix_backend.get_impl_cls()
    forward = merge.forward

    def recorded(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        if self.spec.mask_kind is attnlib.MaskKind.BIDIRECTIONAL:
            seen.append(query.shape[0])
        return forward(self, query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "forward", recorded)
        attnlib.warmup(layer, cache, limits, builder=builder)
    assert set(seen) == {tokens for _, tokens in batches}
    assert torch.equal(cache.key_cache, before[0]) and torch.equal(cache.value_cache, before[1])


def test_indices_of_prefixes_are_aligned() -> None:
    """Another address modulo 16 bytes would compile the kernels again."""
    host = {"rows": [3, 1, 2], "starts": [0, 3, 5, 9, 11], "none": [], "last": [7]}
    found = _to_device(host, torch.device("cpu"))
    assert {name: part.tolist() for name, part in found.items()} == host
    assert all(part.storage_offset() % 4 == 0 for part in found.values())
