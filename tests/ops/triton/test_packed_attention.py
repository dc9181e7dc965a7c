"""Attention over the packed cache: the Triton operations against the torch ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops import paged_attention
from attnlib.ops.block_sparse import BlockSparsePattern
from attnlib.ops.dispatch import operation
from attnlib.ops.packed_cache import typed_cache
from attnlib.ops.paged_attention import PagedAttention
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch import packed_attention as reference
from attnlib.ops.triton import packed_attention as kernels
from attnlib.ops.triton.heuristics.packed_tiles import packed_shared_bytes, packed_tile
from attnlib.ops.triton.heuristics.tiles import Tile


class Case:
    """A filled packed cache with NaN everywhere else, and the batch that it belongs to."""

    def __init__(
        self,
        device: torch.device,
        seq_lens: Sequence[int] = (19, 1, 40),
        *,
        heads: tuple[int, int] = (6, 2),
        size: int = 32,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
        scale: Any = 1.0,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        num_heads, self.num_kv_heads = heads
        columns = -(-max(seq_lens) // block_size)
        num_blocks = columns * len(seq_lens) + 2
        stored = torch.uint8 if kv_cache_dtype.startswith("fp8") else dtype
        shape = PagedAttention.get_kv_cache_shape(num_blocks, block_size, heads[1], size)
        kv_cache = torch.empty(shape, dtype=stored)
        kv_cache.fill_(0x7F if stored == torch.uint8 else math.nan)
        table = torch.randperm(num_blocks, generator=generator)[: columns * len(seq_lens)]
        self.table = table.view(len(seq_lens), columns).int()
        slots = [
            int(self.table[r, p // block_size]) * block_size + p % block_size
            for r, n in enumerate(seq_lens)
            for p in range(n)
        ]
        self.slots = torch.tensor([*slots, -1]).to(device)
        self.key, self.value = (
            torch.randn(sum(seq_lens) + 1, heads[1], size, generator=generator).to(device, dtype)
            for _ in range(2)
        )
        self.caches = tuple(
            typed_cache(view.to(device), kv_cache_dtype)
            for view in PagedAttention.split_kv_cache(kv_cache, heads[1], size)
        )
        scales = {"k_scale": scale, "v_scale": scale}
        kernels.packed_write(self.key, self.value, *self.caches, self.slots, **scales)
        for request, seq_len in enumerate(seq_lens):
            self.table[request, -(-seq_len // block_size) :] = 10**6  # never read (P3)
        self.table = self.table.to(device)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32).to(device)
        self.query = torch.randn(len(seq_lens), num_heads, size, generator=generator).to(
            device, dtype
        )
        slopes = 2.0 ** -torch.arange(1, num_heads + 1, dtype=torch.float32)
        self.slopes = slopes.to(device)

    def decode(self, pattern: BlockSparsePattern | None = None, **params: Any) -> None:
        """Run both operations and compare."""
        given = AttentionParams(**{"scale": 0.2, **params})
        out, wanted = torch.full_like(self.query, math.nan), torch.empty_like(self.query)
        for operation_, result in ((kernels.packed_decode, out), (reference.packed_decode, wanted)):
            operation_(
                self.query, *self.caches, self.table, self.seq_lens, given,
                max_seq_len=int(self.seq_lens.max()), out=result, pattern=pattern,
            )  # fmt: skip
        _assert_close(out, wanted)


def _assert_close(out: Tensor, wanted: Tensor) -> None:
    tolerance = 2e-5 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("per_head", [False, True])
def test_write_stores_the_bits_of_the_reference(
    kv_cache_dtype: str, per_head: bool, device: torch.device
) -> None:
    """P4, M9: every element in its place, the same bits; -1 writes nothing."""
    scale = torch.tensor([0.5, 0.25], device=device) if per_head else 0.5
    case = Case(device, kv_cache_dtype=kv_cache_dtype, scale=scale)
    wanted = []
    for cache in case.caches:
        blank = torch.empty(cache.shape, dtype=cache.dtype, device=device)
        as_bytes = blank.view(torch.uint8) if blank.dtype.itemsize == 1 else blank
        as_bytes.fill_(0x7F if blank.dtype.itemsize == 1 else math.nan)
        wanted.append(blank)
    reference.packed_write(case.key, case.value, *wanted, case.slots, k_scale=scale, v_scale=scale)
    for cache, other in zip(case.caches, wanted, strict=True):
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("alibi", [False, True])
def test_decode(alibi: bool, device: torch.device) -> None:
    """P3, P5: only the written tokens are read; a request of one key, and one of many."""
    case = Case(device)
    case.decode(alibi_slopes=case.slopes if alibi else None)


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64, 80, 96, 112, 120, 128, 192, 256])
def test_decode_of_every_head_size(size: int, device: torch.device) -> None:
    Case(device, (70, 3), heads=(2, 1), size=size, block_size=16).decode()


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 16, 32, 128])
def test_decode_of_block_sizes(block_size: int, device: torch.device) -> None:
    """Several blocks per tile, and several tiles per block."""
    Case(device, (150, 31), block_size=block_size).decode()


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (40, 1), (24, 3)])
def test_decode_of_groups(heads: tuple[int, int], device: torch.device) -> None:
    """GQA: fewer, as many and more heads than rows of a tile."""
    Case(device, (33, 9), heads=heads).decode()


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("per_head", [False, True])
def test_decode_of_fp8(kv_cache_dtype: str, per_head: bool, device: torch.device) -> None:
    """M9: scales as numbers and per KV head."""
    scale = torch.tensor([0.5, 0.25], device=device) if per_head else 0.5
    case = Case(device, kv_cache_dtype=kv_cache_dtype, scale=scale)
    case.decode(k_scale=scale, v_scale=scale)


@pytest.mark.slow
def test_decode_of_float16(device: torch.device) -> None:
    Case(device, (100, 7), dtype=torch.float16, size=64, block_size=16).decode()


@pytest.mark.slow
def test_decode_splits_long_requests(device: torch.device) -> None:
    """Splits of a ragged batch are combined; an empty request yields 0 (M7)."""
    Case(device, (700, 0, 5), heads=(2, 1), block_size=16).decode()


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 2, -1])
@pytest.mark.parametrize(("local", "stride"), [(1, 3), (0, 4)])
def test_block_sparse_decode(step: int, local: int, stride: int, device: torch.device) -> None:
    """Stripes per query head and per KV head; heads that see no key yield 0."""
    case = Case(device, (67, 3, 40))
    case.decode(BlockSparsePattern(local, stride, 16, step, 6, 2, tp_rank=1))


def prefill(
    case: Case,
    query_lens: Sequence[int],
    params: AttentionParams,
    rows: int = 0,
    magnitude: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Results of both operations; `rows` rows follow the batch."""
    device = case.table.device
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    total = sum(query_lens) + rows
    generator = torch.Generator().manual_seed(5)
    heads, size = case.query.shape[1:]
    query, key, value = (
        torch.randn(total, count, size, generator=generator).to(device, case.query.dtype)
        for count in (heads, case.num_kv_heads, case.num_kv_heads)
    )
    query *= magnitude
    results = []
    for operation_ in (kernels.packed_prefill, reference.packed_prefill):
        out = torch.full_like(query, math.nan)
        operation_(
            query, key, value, *case.caches, case.table, starts, case.seq_lens, params,
            max_query_len=max(query_lens), out=out,
        )  # fmt: skip
        results.append(out)
    return results[0], results[1]


@pytest.mark.slow
@pytest.mark.parametrize("left", [-1, 0, 6, 100])
@pytest.mark.parametrize("alibi", [False, True])
def test_prefill(left: int, alibi: bool, device: torch.device) -> None:
    """M1, M2, M6: context and new tokens; the cache is not read for new tokens."""
    case = Case(device)
    slopes = case.slopes if alibi else None
    params = AttentionParams(scale=0.2, window=(left, -1), alibi_slopes=slopes)
    out, wanted = prefill(case, (3, 1, 25), params, rows=4)
    _assert_close(out, wanted)
    assert not out[29:].any()


@pytest.mark.slow
def test_prefill_of_prompts_and_long_contexts(device: torch.device) -> None:
    """No context, more tokens than one tile has, and a request without new tokens."""
    case = Case(device, (90, 130, 12), heads=(4, 2), size=96, block_size=16)
    _assert_close(*prefill(case, (90, 40, 0), AttentionParams(scale=0.1)))


def test_prefill_over_a_float8_context(device: torch.device) -> None:
    """M9: the context has scales, the new tokens have none."""
    scale = torch.tensor([0.5, 0.25], device=device)
    case = Case(device, kv_cache_dtype="fp8", scale=scale)
    params = AttentionParams(scale=0.2, k_scale=scale, v_scale=scale)
    _assert_close(*prefill(case, (3, 1, 25), params))


def test_large_queries_over_a_float8_cache(device: torch.device) -> None:
    """M9: bfloat16 queries beyond the range of float16, in which they are multiplied."""
    case = Case(device, dtype=torch.bfloat16, kv_cache_dtype="fp8")
    params = AttentionParams(scale=2e-7)
    _assert_close(*prefill(case, (3, 1, 25), params, magnitude=1e6))
    case.query *= 1e6
    case.decode(scale=2e-7)


def test_the_interface_serves_gpus_by_triton(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """`PagedAttention` passes its arguments to the kernels as it does to the reference."""
    results = []
    for package in ("torch", "triton"):
        module = {"torch": reference, "triton": kernels}[package]
        monkeypatch.setattr(
            paged_attention, "packed_operation", lambda name, *_, m=module: getattr(m, name)
        )
        case = Case(device)
        key_cache, value_cache = case.caches
        slots = case.slots.view(-1, 1).int()
        PagedAttention.write_to_paged_cache(
            -case.key, case.value, key_cache, value_cache, slots, "auto", 2.0, 2.0
        )
        shared = (key_cache, value_cache, case.table)
        decoded = PagedAttention.forward_decode(
            case.query, *shared, case.seq_lens, 40, "auto", 2, 0.2, case.slopes, 2.0, 2.0,
            tp_rank=1, blocksparse_local_blocks=1, blocksparse_vert_stride=3,
            blocksparse_block_size=16, blocksparse_head_sliding_step=1,
        )  # fmt: skip
        starts = torch.tensor([0, 1, 2, 3], device=device)
        prefixed = PagedAttention.forward_prefix(
            case.query, case.key[:3], case.value[:3], "auto", *shared, starts,
            case.seq_lens.long(), 1, case.slopes, 9, 2.0, 2.0,
        )  # fmt: skip
        results.append((decoded, prefixed))
    for out, wanted in zip(*results, strict=True):
        _assert_close(out, wanted)


def test_dispatch_is_by_device_and_dtype() -> None:
    assert operation("packed_attention", "packed_decode", torch.zeros(1)) is (
        reference.packed_decode
    )


def test_tiles_fit_the_shared_memory() -> None:
    """The largest tile that fits; an error that names the limit if none does."""
    decode, prefill = (packed_tile(128, 2, 2, rows, 227 * 1024) for rows in (4, 512))
    assert decode == Tile(16, 16, 1, 4) and prefill == Tile(64, 64, 4, 3)
    for rows in (4, 512):
        small = packed_tile(128, 2, 2, rows, 48 * 1024)
        assert packed_shared_bytes(small, 128, 2, 2) <= 48 * 1024
    with pytest.raises(UnsupportedConfigError, match="the chip allows 1024"):
        packed_tile(128, 2, 2, 4, 1024)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(3, 6, 16)}, "tokens have shape"),
        ({"query": torch.zeros(3, 5, 32)}, "a multiple of 2"),
        ({"key_cache": torch.zeros(9, 2, 8, 12, 4), "value_cache": torch.zeros(9, 2, 32, 12)},
         "12 is not a power of two"),
        ({"value_cache": torch.zeros(9, 2, 32, 16)}, "value_cache has shape"),
        ({"key_cache": torch.zeros(9, 2, 8, 8)}, "use PagedAttention.split_kv_cache"),
        ({"table": torch.zeros(3, 10, dtype=torch.int32)[:, ::2]}, "block_table has last stride"),
        ({"seq_lens": torch.ones(6, dtype=torch.int32)[::2]}, "seq_lens is strided"),
    ],
)  # fmt: skip
def test_tensors_that_the_kernels_cannot_address(
    change: dict[str, Tensor], words: str, device: torch.device
) -> None:
    """Named errors before any launch."""
    case = Case(device)
    given = {
        "query": case.query, "key_cache": case.caches[0], "value_cache": case.caches[1],
        "table": case.table, "seq_lens": case.seq_lens, **change,
    }  # fmt: skip
    with pytest.raises(ContractError, match=words):
        kernels.packed_decode(
            *given.values(), AttentionParams(scale=1.0), max_seq_len=40,
            out=torch.empty_like(given["query"]),
        )  # fmt: skip


def test_slots_past_the_cache() -> None:
    """P4: refused before anything is written, on a CPU; a GPU does not read them."""
    case = Case(torch.device("cpu"))
    before = [cache.view(torch.uint8).clone() for cache in case.caches]
    num_slots = case.caches[1].shape[0] * case.caches[1].shape[3]
    slots = torch.zeros_like(case.slots)
    slots[-1] = num_slots
    for operations in (kernels, reference):
        with pytest.raises(ContractError, match=f"={num_slots} is outside the cache"):
            operations.packed_write(case.key, case.value, *case.caches, slots)
    for cache, clean in zip(case.caches, before, strict=True):
        assert torch.equal(cache.view(torch.uint8), clean)
