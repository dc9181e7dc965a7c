"""Rows of the first seed: MinivLLM's attention layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.compat.seeds import minivllm_original
from tests.compat.seeds.table import Seed

__all__ = ["SEED"]

SEED = Seed(1, "minivllm-attention-layer", "attnlib.compat.minivllm", minivllm_original)
row = SEED.row

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
STARTS = torch.tensor([0, 5, 12])  # two prompts, of 5 and 7 tokens
LENS = torch.tensor([5, 7])
TABLE = torch.tensor([[3, -1], [6, -1]])
SLOTS = torch.cat([3 * BLOCK + torch.arange(5), 6 * BLOCK + torch.arange(7)])
LAST = torch.tensor([4, 11])
SIZES = (HEADS, KV_HEADS, SIZE)
NAMES = ("Attention", "flash_attention_prefill", "paged_attention_decode", "store_kvcache")


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of both prompts; the same ones for the original and attnlib."""
    k, v = torch.randn(2, 12, KV_HEADS, SIZE)
    return torch.randn(12, HEADS, SIZE), k, v


def layer_of(lib: Any, **changes: Any) -> Any:
    sizes = {"num_heads": HEADS, "head_dim": SIZE, "scale": 1.0, "num_kv_heads": KV_HEADS}
    layer = lib.Attention(**{**sizes, "block_size": BLOCK, **changes})
    layer.k_cache, layer.v_cache = torch.zeros(2, 8, BLOCK, KV_HEADS, SIZE)
    return layer


def steps(lib: Any, **changes: Any) -> tuple[Tensor, Tensor, Any]:
    """A prefill of both prompts, a decode of their last tokens again, and the layer."""
    layer, (q, k, v) = layer_of(lib, **changes), tokens()
    lib.set_context(True, cu_seqlens_q=STARTS, slot_mapping=SLOTS)
    prefilled = layer(q, k, v)
    lib.set_context(False, slot_mapping=SLOTS[LAST], context_lens=LENS, block_tables=TABLE)
    decoded = layer(q[LAST], k[LAST], v[LAST])
    lib.set_context(False)
    return prefilled, decoded, layer


def arguments_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@row("module `myvllm.layers.attention`", module="attnlib.layers.attention")
def _(lib: Any) -> Any:
    return [callable(getattr(lib, name)) for name in NAMES]


@row("`Attention`, an `nn.Module` with both kernels")
def _(lib: Any) -> Any:
    return isinstance(layer_of(lib), torch.nn.Module), [p for p in layer_of(lib).parameters()]


@row("picks prefill or decode at run time")
def _(lib: Any) -> Any:
    return steps(lib)[:2]


@row("... from a global `Context`")
def _(lib: Any) -> Any:
    found = []
    for phase in (True, False):
        lib.set_context(phase, slot_mapping=SLOTS)
        found.append((lib.get_context().is_prefill, lib.get_context().slot_mapping))
    lib.set_context(False)
    return found


@row("owns `k_cache`, `v_cache`, empty at first")
def _(lib: Any) -> Any:
    layer = lib.Attention(HEADS, SIZE)
    lib.set_context(True, cu_seqlens_q=STARTS)
    out = layer(*(torch.randn(12, HEADS, SIZE) for _ in range(3)))
    lib.set_context(False)
    return layer.k_cache.numel(), layer.v_cache.numel(), out


@row("`Attention(num_heads, head_dim, scale, num_kv_heads, block_size)`")
def _(lib: Any) -> Any:
    defaults = [lib.Attention(heads, SIZE, 1.0).num_kv_heads for heads in (1, 4)]
    return arguments_of(lib.Attention), defaults, layer_of(lib).num_kv_heads


@row("`scale` is multiplied with 1 / sqrt(head_dim)", note="`attnlib.Attention` takes the product")
def _(lib: Any) -> Any:
    return steps(lib, scale=3.0)[:2], steps(lib, scale=0.25)[:2]


@row("writes new keys before attending")
def _(lib: Any) -> Any:
    _, _, layer = steps(lib)
    return layer.k_cache, layer.v_cache


@row("output `(T, H * D)` in both phases")
def _(lib: Any) -> Any:
    return [list(out.shape) for out in steps(lib)[:2]]


@row("`flash_attention_prefill(q, k, v, cu_seqlens, scale, num_heads, num_kv_heads, head_dim)`")
def _(lib: Any) -> Any:
    call = lib.flash_attention_prefill
    return arguments_of(call), call(*tokens(), STARTS, 0.3, *SIZES)


@row("GQA in it")
def _(lib: Any) -> Any:
    found = []
    for heads, kv_heads in ((6, 2), (4, 1), (3, 3)):
        q, k, v = (torch.randn(12, n, SIZE) for n in (heads, kv_heads, kv_heads))
        found.append(lib.flash_attention_prefill(q, k, v, STARTS, 0.2, heads, kv_heads, SIZE))
    return found


@row("returns a tensor `(T, num_heads, head_dim)`")
def _(lib: Any) -> Any:
    found = []
    for size in (32, 64, 80):
        q, k, v = torch.randn(3, 7, HEADS, size)
        found.append(lib.flash_attention_prefill(q, k, v, torch.tensor([0, 7]), 1.0, 4, 4, size))
    return [list(out.shape) for out in found], [str(out.dtype) for out in found]


def tiles_of_attnlib() -> list[tuple[int, int]]:
    from attnlib.ops.triton.heuristics.choose_tiles import TileRequest, choose_prefill_tile

    requests = (TileRequest((d, d), (2, 2), 1024, 48 * 1024, "sync") for d in (64, 128, 256))
    return [(tile.block_m, tile.block_n) for tile in map(choose_prefill_tile, requests)]


@row(
    "tile sizes by head size within 48 KB",
    differs="tables and the limit of the chip decide",
    ours=tiles_of_attnlib,
)
def _(lib: Any) -> Any:
    return [lib.tile_sizes(head_dim) for head_dim in (64, 128, 256)]


def grid_of_attnlib() -> tuple[int, ...]:
    """The grid of the kernel that serves two prompts on a GPU; nothing is launched."""
    from attnlib.ops.params import AttentionParams
    from attnlib.ops.triton.launch.bound import BoundLaunch
    from attnlib.ops.triton.varlen_prefill import varlen_prefill

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (x.to(device) for x in tokens())
    starts, grids = STARTS.int().to(device), []

    def record(launch: BoundLaunch, *_: Any) -> None:
        grids.append(launch._grid)

    with mock.patch.object(BoundLaunch, "run", record):
        varlen_prefill(
            q, k, v, starts, starts, AttentionParams(scale=1.0), max_seqlen_q=12, max_seqlen_k=12,
            out=torch.empty_like(q), kernels="portable",
        )  # fmt: skip
    return tuple(grids[0])


@row(
    "grid over tiles, heads and sequences",
    differs="tiles hold several query heads of a KV head; bounds replace the longest length",
    ours=grid_of_attnlib,
)
def _(lib: Any) -> Any:
    return lib.prefill_grid(STARTS, HEADS, SIZE)


def decoded_with(
    lib: Any, block: int = BLOCK, kind: torch.dtype = torch.int64, unused: int = -1
) -> Tensor:
    """Decode of sequences of 5, 40 and 1 keys over a filled cache."""
    table = torch.tensor([[3, -1, -1, -1, -1], [6, 1, 0, 7, 4], [2, -1, -1, -1, -1]])
    k_cache, v_cache = torch.randn(2, 8, block, KV_HEADS, SIZE)
    lens = torch.tensor([5, 4 * block + 3, 1])
    query = torch.randn(3, HEADS, SIZE)
    used = torch.where(table < 0, unused, table).to(kind)
    return lib.paged_attention_decode(query, k_cache, v_cache, used, lens, 0.3, *SIZES, block)


@row(
    "`paged_attention_decode(query, k_cache, v_cache, block_tables, context_lens, scale, "
    "num_heads, num_kv_heads, head_dim, block_size)`"
)
def _(lib: Any) -> Any:
    return arguments_of(lib.paged_attention_decode), decoded_with(lib)


@row("cache `(num_blocks, block_size, num_kv_heads, head_dim)`")
def _(lib: Any) -> Any:
    return [decoded_with(lib, block) for block in (8, 16, 32, 256)]


@row("`-1` in unallocated table entries", note="not read")
def _(lib: Any) -> Any:
    return [decoded_with(lib, unused=entry) for entry in (-1, 0, 5)]


@row("int64 table", note="any integer dtype")
def _(lib: Any) -> Any:
    return [decoded_with(lib, kind=kind) for kind in (torch.int64, torch.int32, torch.int16)]


def stored(lib: Any, slots: Tensor) -> list[Tensor]:
    """The caches after a write to empty ones."""
    caches = list(torch.zeros(2, 8, BLOCK, KV_HEADS, SIZE))
    key, value = torch.randn(2, len(slots), KV_HEADS, SIZE)
    assert lib.store_kvcache(key, value, *caches, slots, BLOCK) is None
    return caches


@row("`store_kvcache(key, value, k_cache, v_cache, slot_mapping, block_size)`")
def _(lib: Any) -> Any:
    return arguments_of(lib.store_kvcache), stored(lib, SLOTS)


@row("`-1` slots are skipped")
def _(lib: Any) -> Any:
    return stored(lib, torch.tensor([-1, 17, -1, 127])), stored(lib, torch.tensor([-1]))


@row("slots of any integer dtype")
def _(lib: Any) -> Any:
    kinds = (torch.int8, torch.int16, torch.int32, torch.int64)
    return [stored(lib, torch.tensor([17, -1, 3], dtype=kind)) for kind in kinds]


@row("slot -> (slot // block, slot % block)")
def _(lib: Any) -> Any:
    return [cache.abs().sum((2, 3)).nonzero() for cache in stored(lib, torch.tensor([35, 0, 127]))]


@row("the functions are importable from `attnlib.ops`", module="attnlib.ops")
def _(lib: Any) -> Any:
    q, k, v = tokens()
    prefilled = lib.flash_attention_prefill(q, k, v, STARTS, 0.3, *SIZES)
    return prefilled, decoded_with(lib), stored(lib, SLOTS)
