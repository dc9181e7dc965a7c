"""Rows of the third seed: vLLM's PagedAttention operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from attnlib.ops import dispatch, paged_attention
from tests.compat.seeds import paged_ops_original
from tests.compat.seeds.table import Seed

__all__ = ["SEED"]

SEED = Seed(3, "vllm-paged-attention-ops", "attnlib.compat.vllm.ops.paged_attn", paged_ops_original)
row = SEED.row

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 32, 16, 9
LENS = torch.tensor([5, 39, 16], dtype=torch.int32)
STARTS = [0, 5, 44, 60]
TABLE = torch.tensor([[3, 8, 8], [6, 0, 7], [2, 8, 8]], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
METHODS = (
    *("get_supported_head_sizes", "get_kv_cache_shape", "split_kv_cache"),
    *("write_to_paged_cache", "forward_decode", "forward_prefix", "swap_blocks", "copy_blocks"),
)
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


class Batch:
    """Three sequences of 5, 39 and 16 tokens in a packed cache; other positions hold garbage.

    Args:
        lib: the module under test.
        size: elements of one head.
        block: tokens of one block.
        kind: `kv_cache_dtype`.
        scale: of a float8 cache.
        cache_dtype: of the cache, uint8 for float8.
    """

    def __init__(
        self,
        lib: Any,
        size: int = SIZE,
        block: int = BLOCK,
        kind: str = "auto",
        scale: Any = 1.0,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.ops, self.size, self.block = lib.PagedAttention, size, block
        self.kind, self.scale = kind, scale
        self.key, self.value = torch.randn(2, 60, KV_HEADS, size)
        self.query = torch.randn(60, HEADS, size)
        pages = 40 if block < BLOCK else BLOCKS
        self.table = TABLE if block >= BLOCK else torch.randperm(pages)[:39].view(3, 13).int()
        shape = self.ops.get_kv_cache_shape(pages, block, KV_HEADS, size)
        dtype = torch.uint8 if kind in FP8 else cache_dtype
        self.kv_cache = torch.full(shape, 100 if kind in FP8 else 1e4, dtype=dtype)
        self.caches = self.ops.split_kv_cache(self.kv_cache, KV_HEADS, size)
        self.slots = torch.tensor(
            [
                int(self.table[sequence, position // block]) * block + position % block
                for sequence, length in enumerate(LENS.tolist())
                for position in range(length)
            ]
        )
        self.write(self.key, self.value, self.slots)

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        scales = (self.scale, self.scale)
        found = self.ops.write_to_paged_cache(key, value, *self.caches, slots, self.kind, *scales)
        assert found is None

    def decode(
        self, table: Tensor | None = None, alibi: Tensor | None = None, bound: int = 39, **more: Any
    ) -> Tensor:
        query = self.query[[4, 43, 59]]
        return self.ops.forward_decode(
            query, *self.caches, self.table if table is None else table, LENS, bound, self.kind,
            KV_HEADS, 0.2, alibi, self.scale, self.scale, **more,
        )  # fmt: skip

    def prefix(self, window: int | None = None, alibi: Tensor | None = None) -> Tensor:
        """The last 3, 7 and 16 tokens over their context; the last sequence has none."""
        new = torch.cat(
            [torch.arange(e - n, e) for e, n in zip(STARTS[1:], (3, 7, 16), strict=True)]
        )
        return self.ops.forward_prefix(
            self.query[new], self.key[new], self.value[new], self.kind, *self.caches, self.table,
            torch.tensor([0, 3, 10, 26]), LENS, 16, alibi, window, self.scale, self.scale,
        )  # fmt: skip


def arguments_of(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    given = inspect.signature(function).parameters.values()
    return [(p.name, p.default is p.empty or p.default) for p in given]


def raises_assertion(call: Callable[[], Any]) -> bool:
    """Whether a program that catches the original's AssertionError goes on."""
    try:
        call()
    except AssertionError:
        return True
    return False


@row("`PagedAttention`, eight static methods")
def _(lib: Any) -> Any:
    ops = lib.PagedAttention
    static = [isinstance(inspect.getattr_static(ops, name), staticmethod) for name in METHODS]
    return static, [arguments_of(getattr(ops, name)) for name in METHODS]


@row("importable near the top", module="attnlib.ops")
def _(lib: Any) -> Any:
    return Batch(lib).decode(), lib.PagedAttentionMetadata(LENS, 39, TABLE).block_tables


@row("`get_supported_head_sizes()`")
def _(lib: Any) -> Any:
    return lib.PagedAttention.get_supported_head_sizes()


@row("all nine head sizes compute")
def _(lib: Any) -> Any:
    sizes = lib.PagedAttention.get_supported_head_sizes()
    return [(Batch(lib, size).decode(), Batch(lib, size).prefix()) for size in sizes]


@row("`get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)`")
def _(lib: Any) -> Any:
    shape = lib.PagedAttention.get_kv_cache_shape
    return [shape(8, 16, 2, 32), shape(num_blocks=3, block_size=32, num_kv_heads=5, head_size=80)]


@row("`split_kv_cache`: keys `[B, H, D / x, N, x]`, values `[B, H, D, N]`")
def _(lib: Any) -> Any:
    found = []
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        kv_cache = torch.arange(2 * 3 * 1024).view(2, 3, 1024).remainder(251).to(dtype)
        views = lib.PagedAttention.split_kv_cache(kv_cache, 2, 32)
        views[0][2, 1, 0, 3, 1], views[1][1, 1, 5, 3] = 251, 252  # views: the cache changes
        found.append((*views, kv_cache))
    return found


@row("a head size that does not pack")
def _(lib: Any) -> Any:
    try:
        return lib.PagedAttention.split_kv_cache(torch.zeros(2, 8, 3840, dtype=torch.uint8), 2, 120)
    except (RuntimeError, ValueError):
        return "an error"


@row(
    "`write_to_paged_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, "
    "k_scale, v_scale)`"
)
def _(lib: Any) -> Any:
    batch = Batch(lib)
    key, value = torch.randn(2, 4, KV_HEADS, SIZE)
    batch.write(key, value, torch.tensor([[-1, 17], [143, 0]]))
    return batch.kv_cache, Batch(lib, cache_dtype=torch.float16).kv_cache


@row("`kv_cache_dtype`: auto, fp8, fp8_e4m3, fp8_e5m2", note="on uint8 caches")
def _(lib: Any) -> Any:
    batches = [Batch(lib, kind=kind, scale=0.5) for kind in ("auto", *FP8)]
    return [(batch.kv_cache, batch.decode()) for batch in batches]


@row(
    "`forward_decode(query, key_cache, ..., alibi_slopes, k_scale, v_scale)`",
    note="blocks of any size; without a kernel, on a GPU, where they are not a power of two",
)
def _(lib: Any) -> Any:
    batches = [Batch(lib, block=block) for block in (3, 8, 12, 16, 24, 32)]
    return [(batch.decode(), batch.decode(alibi=SLOPES), batch.prefix()) for batch in batches]


def with_triton_kernels() -> Any:
    """The calls of the next row by the kernels of a GPU, interpreted."""
    load = dispatch._load
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no GPU; tests/gpu runs them on one")
    with mock.patch.object(dispatch, "_load", lambda _, *names: load("triton", *names)):
        return decodes_and_prefixes(paged_attention)


def decodes_and_prefixes(lib: Any) -> Any:
    batches = [Batch(lib), Batch(lib, kind="fp8", scale=0.5), Batch(lib, 80, 32)]
    return [(batch.kv_cache, batch.decode(), batch.prefix(3, SLOPES)) for batch in batches]


@row("... as a GPU kernel", ours=with_triton_kernels, note="interpreted in this test")
def _(lib: Any) -> Any:
    return decodes_and_prefixes(lib)


@row("keys and values share one `kv_cache`")
def _(lib: Any) -> Any:
    batch = Batch(lib)
    batch.kv_cache[1] *= 2.0
    return batch.decode(), batch.prefix()


@row("one pass or partitions", note="the lengths decide")
def _(lib: Any) -> Any:
    return [Batch(lib).decode(bound=bound) for bound in (39, 512, 513, 8192, 9000)]


@row("`_PARTITION_SIZE`", note="attnlib chooses its splits")
def _(lib: Any) -> Any:
    return lib._PARTITION_SIZE


@row(
    "`_PARTITION_SIZE % block_size == 0`",
    differs="no such limit: any block size, also for long sequences",
)
def _(lib: Any) -> Any:
    return [
        raises_assertion(lambda size=size: Batch(lib, block=size).decode(bound=9000))
        for size in (4, 12, 16, 24)
    ]


@row(
    "block-sparse decode: `tp_rank`, `blocksparse_local_blocks`, `_vert_stride`, `_block_size`, "
    "`_head_sliding_step`"
)
def _(lib: Any) -> Any:
    patterns = [
        (rank, local, stride, size, step)
        for rank, local, stride, size, step in (
            *((0, 1, 3, 16, 0), (0, 1, 3, 16, 1), (0, 2, 4, 32, -1), (1, 1, 3, 16, 1)),
            *((1, 1, 3, 16, 2), (3, 1, 4, 16, -1), (0, 1, 1, 16, 1), (0, 1, 2, 48, 0)),
        )
    ]
    names = ("tp_rank", "blocksparse_local_blocks", "blocksparse_vert_stride",
             "blocksparse_block_size", "blocksparse_head_sliding_step")  # fmt: skip
    return [Batch(lib).decode(**dict(zip(names, p, strict=True))) for p in patterns]


@row("block-sparse divisibility check")
def _(lib: Any) -> Any:
    return [
        raises_assertion(
            lambda stride=stride, size=size: Batch(lib).decode(
                blocksparse_local_blocks=1,
                blocksparse_vert_stride=stride,
                blocksparse_block_size=size,
            )
        )
        for stride, size in ((2, 24), (2, 0), (2, -16), (2, 32), (0, 24), (1, 24), (None, 24))
    ]


@row("`forward_prefix` with ALiBi, window, fp8 context")
def _(lib: Any) -> Any:
    plain = [
        Batch(lib).prefix(window=window, alibi=alibi)
        for window in (None, 0, 1, 2, 8, 100)
        for alibi in (None, SLOPES)
    ]
    return plain, [Batch(lib, kind=kind, scale=0.5).prefix(window=3) for kind in FP8]


@row("softmax scale 1 / sqrt(D) there")
def _(lib: Any) -> Any:
    return [Batch(lib, size).prefix() for size in (32, 64, 80)]


def pools() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 6, 512), torch.randn(2, 4, 512)


@row("`swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)`", note="also pairs of tensors")
def _(lib: Any) -> Any:
    source, target = pools()
    ops, pairs = lib.PagedAttention, torch.tensor([[5, 0], [2, 3], [2, 1]])
    assert ops.swap_blocks(source, target, pairs) is None
    forms = [(list(pools()[0]), list(pools()[1])) for _ in range(2)]
    ops.swap_blocks(*forms[0], pairs.int())
    ops.swap_blocks(tuple(forms[1][0]), tuple(forms[1][1]), pairs[:1])
    return source, target, forms


@row("`copy_blocks(kv_caches, src_to_dists)`", note="also pairs of tensors")
def _(lib: Any) -> Any:
    layers = [pools()[0], list(pools()[0]), tuple(pools()[0])]
    pairs = torch.tensor([[0, 2], [0, 3], [5, 1]])
    assert lib.PagedAttention.copy_blocks(layers, pairs) is None
    lib.PagedAttention.copy_blocks(layers, torch.empty(0, 2, dtype=torch.int64))
    return layers


@row("bad ids in both", note="checked before anything is written")
def _(lib: Any) -> Any:
    found = []
    for pair in ([40, 0], [0, 40]):
        source, target = pools()
        for call in (
            lambda s=source, t=target, p=pair: lib.PagedAttention.swap_blocks(
                s, t, torch.tensor([p])
            ),
            lambda t=target, p=pair: lib.PagedAttention.copy_blocks([t], torch.tensor([p])),
        ):
            try:
                call()
                found.append("copied")
            except (IndexError, ValueError):
                found.append("an error")
        found.append((source, target))
    return found


@row("`PagedAttentionMetadata(seq_lens_tensor, max_decode_seq_len, block_tables)`")
def _(lib: Any) -> Any:
    made = lib.PagedAttentionMetadata(LENS, 39, TABLE)
    made.max_decode_seq_len = 40
    empty = lib.PagedAttentionMetadata(
        seq_lens_tensor=None, max_decode_seq_len=0, block_tables=None
    )
    return vars(made), vars(empty), arguments_of(lib.PagedAttentionMetadata)


@row("float or tensor scales, per head")
def _(lib: Any) -> Any:
    scales = (0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5, 0.25]))
    batches = [Batch(lib, kind="fp8", scale=scale) for scale in scales]
    return [(batch.kv_cache, batch.decode(), batch.prefix()) for batch in batches]


@row("`-1` or garbage at the end of a table", note="not read")
def _(lib: Any) -> Any:
    tables = [torch.where(TABLE == 8, entry, TABLE) for entry in (-1, 10**6, 0)]
    return [Batch(lib).decode(table=table) for table in tables]


@row("`block_tables` int32", note="int64, too")
def _(lib: Any) -> Any:
    return [Batch(lib).decode(table=TABLE.to(kind)) for kind in (torch.int32, torch.int64)]


@row("`num_kv_heads`, `max_seq_len` arguments", note="the caches have the number of heads")
def _(lib: Any) -> Any:
    batch = Batch(lib)
    given = {"max_seq_len": 64, "num_kv_heads": KV_HEADS, "kv_cache_dtype": "auto", "scale": 0.2}
    return lib.PagedAttention.forward_decode(
        batch.query[[4, 43, 59]], *batch.caches, TABLE, LENS, **given, alibi_slopes=None,
        k_scale=torch.tensor(1.0), v_scale=torch.tensor(1.0),
    )  # fmt: skip
