"""`warmup` runs every class of shapes within the limits and does not change the cache."""

from __future__ import annotations

from math import gcd
from typing import Any

import pytest
import torch

from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.layer import Attention
from attnlib.layer.warmup import warmup
from attnlib.layer.warmup_batches import large_write, long_batches, new_batch, warmup_batches
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import AttentionSpec, AttentionType, MaskKind
from attnlib.workspace import BatchLimits

LIMITS = BatchLimits(max_num_reqs=6, max_num_tokens=40, max_seq_len=96)
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=16, needs_lse=True
)


def test_batches_cover_the_classes_and_stay_within_the_limits() -> None:
    """All query lengths up to the threshold, powers of two, the limit; all prefill alignments."""
    batches = warmup_batches(LIMITS, 8)
    for lengths in batches:
        assert len(lengths) <= 6 and sum(lengths) <= 40
    uniform = {(lengths[0], len(lengths)) for lengths in batches if len(set(lengths)) == 1}
    assert {(query, 1) for query in range(1, 9)} <= uniform
    assert {(1, reqs) for reqs in (1, 2, 4, 6)} <= uniform and {
        (16, 1),
        (32, 1),
        (40, 1),
        (16, 2),
    } <= uniform
    mixed = [lengths for lengths in batches if len(set(lengths)) > 1]
    assert {lengths.count(1) for lengths in mixed} == {0, 1, 2, 3, 4, 5} and {
        max(lengths) for lengths in mixed
    } >= {9, 39}
    # Decodes that programs do not share evenly, and those of which not all have several tokens.
    assert {(4,) * 3, (4,) * 5, (9,), (1, 1, 1, 1, 1, 8), (2,) * 5 + (9,)} <= set(batches)
    assert warmup_batches(BatchLimits(max_num_reqs=1, max_num_tokens=1, max_seq_len=1)) == [(1,)]


@pytest.mark.parametrize("max_seq_len", [(1 << 31) - 1, (1 << 31) - 16, 3000 * 16, 3 << 24])
def test_block_tables_are_bounded(max_seq_len: int) -> None:
    """One for the longest sequences would take 0.5 GB per request; the row stride of a bounded one
    has the same factors of two, on which kernels depend."""
    columns = -(-max_seq_len // SPEC.block_size)
    table = new_batch(SPEC, (1, 2), columns, torch.device("cpu")).block_table_tensor
    assert table is not None and table.shape[1] <= min(columns, 132_000)
    assert gcd(table.stride(0), 256) == gcd(columns, 256)


def test_a_batch_of_many_tokens_stays_within_the_limits() -> None:
    """On a GPU it runs, too: Hopper writes many tokens with a kernel of its own."""
    assert large_write(BatchLimits(max_num_reqs=8, max_num_tokens=8192, max_seq_len=32768)) == (
        4096,
    )
    assert (
        large_write(BatchLimits(max_num_reqs=8, max_num_tokens=8192, max_seq_len=1024))
        == (1024,) * 4
    )
    assert (
        large_write(BatchLimits(max_num_reqs=2, max_num_tokens=8192, max_seq_len=1024))
        == (1024,) * 2
    )
    assert large_write(LIMITS) == (40,)


@pytest.mark.parametrize(
    ("longest", "chunks"), [(500, []), (1500, [512, 1500]), (9000, [512, 4095])]
)
def test_the_longest_chunk_over_float8_is_run(longest: int, chunks: list[int]) -> None:
    """Tiles depend on the rows: 1500 tokens of heads of 64 have another one than 512."""
    spec = SPEC.replace(dtype=torch.bfloat16, kv_cache_dtype="fp8_e4m3")
    limits = BatchLimits(max_num_reqs=8, max_num_tokens=8192, max_seq_len=longest)
    assert [one for one in long_batches(spec, limits)[1:] if len(one) == 1] == [
        (tokens,) for tokens in chunks
    ]


def test_the_cache_is_unchanged_and_every_batch_is_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    forward = TorchImpl.forward

    def recorded(
        self: TorchImpl,
        query: torch.Tensor,
        cache: Any,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        lengths = tuple(
            (metadata.query_start_loc_cpu[1:] - metadata.query_start_loc_cpu[:-1]).tolist()
        )
        seen.append((lengths, metadata.max_seq_len, query.is_contiguous(), lse is not None))
        forward(self, query, cache, metadata, output, lse)

    monkeypatch.setattr(TorchImpl, "forward", recorded)
    cache = PagedKVCache.allocate(SPEC, 4, "cpu", "HND_INTERLEAVED")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    before = (cache.key_cache.clone(), cache.value_cache.clone())
    report = warmup(Attention(SPEC, backend=TorchBackend, device="cpu"), cache, LIMITS)
    assert torch.equal(cache.key_cache, before[0]) and torch.equal(cache.value_cache, before[1])
    assert {lengths for lengths, *_ in seen} == set(report.batches) and str(
        len(report.batches)
    ) in str(report)
    for lengths in report.batches:
        kinds = {
            (bound, contiguous, lse) for batch, bound, contiguous, lse in seen if batch == lengths
        }
        assert len(kinds) == len({max(lengths), 96}) * 2


@pytest.mark.parametrize(("heads", "forms"), [(3, 2), (4, 1)])
def test_separate_rows_are_run_where_other_factors_divide_their_strides(
    monkeypatch: pytest.MonkeyPatch, heads: int, forms: int
) -> None:
    """Keys of three heads of eight elements have rows of 24, which 16 does not divide."""
    spec = SPEC.replace(num_heads=2 * heads, num_kv_heads=heads, head_size=8, head_size_v=8)
    seen: set[bool] = set()
    forward = TorchImpl.forward

    def recorded(self: TorchImpl, query: torch.Tensor, *call: Any, **more: Any) -> None:
        if query.shape[0] > 1:  # one row of a fused tensor is contiguous
            seen.add(query.is_contiguous())
        forward(self, query, *call, **more)

    monkeypatch.setattr(TorchImpl, "forward", recorded)
    cache = PagedKVCache.allocate(spec, 4, "cpu")
    warmup(Attention(spec, backend=TorchBackend, device="cpu"), cache, LIMITS)
    assert len(seen) == forms


def test_encoders_need_no_cache_and_decoders_do() -> None:
    encoder = Attention(
        SPEC.replace(attn_type=AttentionType.ENCODER_ONLY), backend=TorchBackend, device="cpu"
    )
    assert warmup(encoder, None, LIMITS, device="cpu").batches
    layer: Any = Attention(SPEC, backend=TorchBackend, device="cpu")
    with pytest.raises(ContractError, match="cache is a NoneType; .* needs the PagedKVCache"):
        warmup(layer, None, LIMITS)
    for swapped in ((LIMITS, None, layer), (layer, None, 40)):
        with pytest.raises(ContractError, match=r"call warmup\(layer, cache, BatchLimits\(...\)\)"):
            warmup(*swapped)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_type": AttentionType.ENCODER_DECODER, "mask_kind": None},
        {"mask_kind": MaskKind.PER_REQUEST},
    ],
    ids=["cross-attention", "per request"],
)
def test_masks_of_another_kind_are_warmed_up(changes: dict[str, Any]) -> None:
    """Batches are of the form that the spec declares, and write nothing."""
    spec = SPEC.replace(**changes)
    cache = PagedKVCache.allocate(spec, 4, "cpu")
    held = cache.key_cache.normal_().clone()
    assert warmup(Attention(spec, backend=TorchBackend, device="cpu"), cache, LIMITS).batches
    assert torch.equal(cache.key_cache, held)


@pytest.mark.parametrize("selection", [None, KeySelection(max_blocks=3)])
def test_layers_with_compressed_entries_are_warmed_up(selection: KeySelection | None) -> None:
    """M17: warm-up passes entries of the form that the spec declares."""
    entries = CompressedEntries(compress_rate=4, block_size=8, selection=selection)
    spec = SPEC.replace(compressed_entries=entries)
    cache = PagedKVCache.allocate(spec, 4, "cpu")
    report = warmup(Attention(spec, backend=TorchBackend, device="cpu"), cache, LIMITS)
    assert report.batches


@pytest.mark.parametrize("query_block_size", [1, 4])
def test_layers_with_selected_keys_are_warmed_up(query_block_size: int) -> None:
    """M11: warm-up passes lists of the form that the spec declares."""
    selection = KeySelection(max_blocks=3, block_size=4, query_block_size=query_block_size)
    spec = SPEC.replace(key_selection=selection)
    cache = PagedKVCache.allocate(spec, 4, "cpu")
    report = warmup(Attention(spec, backend=TorchBackend, device="cpu"), cache, LIMITS)
    assert report.batches


def test_every_batch_is_within_small_limits() -> None:
    """Queries are no longer than sequences may be."""
    for most in (1, 3, 40):
        limits = BatchLimits(max_num_reqs=4, max_num_tokens=512, max_seq_len=most)
        batches = [*warmup_batches(limits, 8), large_write(limits)]
        assert max(map(max, batches)) == most
    layer = Attention(SPEC, device="cpu")
    assert warmup(layer, PagedKVCache.allocate(SPEC, 8, "cpu"), limits).batches
