"""Attention to selected keys against attention to all keys.

    python -m benchmarks.gpu.selected_keys --out results/selected_keys.json
    python -m benchmarks.gpu.selected_keys 'latent *'

`decode` rows: 16 blocks of 128 tokens per KV head, 64 query and 4 KV heads, over contexts of
different lengths. The time must not depend on the context. The calls use different lists in turn,
so that the L2 cache does not hold the keys. `prefill` rows: the same selection for each query
token of one request, against the layer without selection. `latent` rows: 2048 tokens per query of
one latent KV head of 576 elements, whose first 512 are the values. If FlashMLA can be imported, its
sparse kernel takes turns with ours in these rows; fewer than 64 heads are padded to 64. They replay
CUDA graphs: prefills reach the power limit of the chip, and a few eager calls would measure how its
clock falls. The outputs of some query tokens are compared with the torch operation before anything
is timed.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from attnlib.bench.key_lists import spread_lists
from attnlib.bench.timer import EagerTimer, GraphTimer, measure_in_turn, warm_up
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.key_indexer import select_keys as torch_select_keys
from attnlib.ops.torch.selected_attention import selected_attention as torch_selected_attention
from attnlib.ops.triton.key_indexer import select_keys
from attnlib.ops.triton.paged_prefill import paged_prefill
from attnlib.ops.triton.selected_attention import selected_attention
from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from benchmarks.gpu import rows

try:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd
except ImportError:
    flash_mla_sparse_fwd = None

BLOCKS = KeySelection(max_blocks=16, block_size=128, scope="kv_head")
TOKENS = KeySelection(max_blocks=2048)
HEADS, KV_HEADS, SIZE = 64, 4, 128
LATENT, LATENT_VALUES = 576, 512
DTYPE = torch.bfloat16
CUDA = torch.device("cuda")
FLASH_MLA_HEADS = 64
"""The sparse kernel of FlashMLA takes multiples of this number of query heads."""
_COLD_BYTES = 256 << 20
"""Bytes of selected keys and values that the calls read in turn, several times the L2 cache."""


class Batch:
    """Requests of equal lengths over a cache with blocks of 64 tokens in random order."""

    def __init__(
        self, requests: int, query_len: int, seq_len: int, latent: bool, heads: int = HEADS
    ) -> None:
        torch.manual_seed(0)
        columns = -(-seq_len // 64)
        kv_heads, size = (1, LATENT) if latent else (KV_HEADS, SIZE)
        shape = (requests * columns, 64, kv_heads, size)
        self.key = torch.randn(shape, device=CUDA, dtype=DTYPE)
        self.value = self.key[..., :LATENT_VALUES] if latent else torch.randn_like(self.key)
        self.table = torch.randperm(shape[0], device=CUDA).view(requests, columns).int()
        tokens = requests * query_len
        self.starts = torch.arange(0, tokens + 1, query_len, device=CUDA, dtype=torch.int32)
        self.seq_lens = torch.full((requests,), seq_len, device=CUDA, dtype=torch.int32)
        self.query = torch.randn(tokens, heads, size, device=CUDA, dtype=DTYPE)
        value_size = LATENT_VALUES if latent else SIZE
        self.out = torch.empty(tokens, heads, value_size, device=CUDA, dtype=DTYPE)
        self.params = AttentionParams(scale=SIZE**-0.5)
        missing = max(0, FLASH_MLA_HEADS - heads) if latent else 0
        self.padded_query = torch.nn.functional.pad(self.query, (0, 0, 0, missing))
        self.query_len, self.seq_len = query_len, seq_len
        self.selection = TOKENS if latent else BLOCKS
        visible = torch.arange(seq_len - query_len + 1, seq_len + 1, device=CUDA).repeat(requests)
        list_heads = self.selection.num_lists_heads(heads, kv_heads)
        keys = tokens * list_heads * self.selection.max_keys
        copies = max(1, min(64, _COLD_BYTES // (keys * size * 4) + 1)) if query_len == 1 else 1
        self.lists = [
            SelectedKeys(spread_lists(list_heads, self.selection, visible)) for _ in range(copies)
        ]

    def selected(self, number: int) -> torch.Tensor:
        """The Triton operation with list `number`."""
        selected_attention(
            self.query, self.key, self.value, self.table, self.starts, self.seq_lens, self.params,
            self.selection, self.lists[number], out=self.out,
        )  # fmt: skip
        return self.out

    def dense(self, number: int) -> torch.Tensor:
        """Attention to all visible keys by the kernels that a layer uses."""
        paged_prefill(
            self.query, self.key, self.value, self.table, self.starts, self.seq_lens, self.params,
            max_query_len=self.query_len, max_seq_len=self.seq_len, out=self.out,
        )  # fmt: skip
        return self.out

    def flash_mla(self, number: int) -> torch.Tensor:
        """FlashMLA's sparse kernel with list `number`, over contiguous latents."""
        assert flash_mla_sparse_fwd is not None
        flat = self.key.view(-1, 1, LATENT)
        lists = self.lists[number].indices
        return flash_mla_sparse_fwd(self.padded_query, flat, lists, self.params.scale)[0]

    def check(self) -> float:
        """Largest difference from the torch operation on the last query tokens of a request."""
        rows = min(4, self.query_len)
        requests = min(2, self.seq_lens.shape[0])
        tokens = torch.cat(
            [torch.arange(rows, device=CUDA) + int(self.starts[r + 1]) - rows
             for r in range(requests)]
        )  # fmt: skip
        expected = torch.empty_like(self.out[tokens])
        torch_selected_attention(
            self.query[tokens], self.key, self.value, self.table[:requests],
            torch.arange(0, requests * rows + 1, rows, device=CUDA, dtype=torch.int32),
            self.seq_lens[:requests], self.params, self.selection,
            SelectedKeys(self.lists[0].indices[tokens]), out=expected,
        )  # fmt: skip
        error = float((self.selected(0)[tokens].float() - expected.float()).abs().max())
        assert error < 2e-2, f"the output differs from torch by {error}"
        return error


class IndexBatch:
    """Index queries of 64 heads over a cache of float8 index keys."""

    def __init__(self, requests: int, query_len: int, seq_len: int) -> None:
        torch.manual_seed(0)
        columns, heads, size = -(-seq_len // 64), 64, 128
        shape = (requests * columns, 64, size)
        # Small integers: their products are exact, and equal scores occur.
        self.key = torch.randint(-2, 3, shape, device=CUDA).float().to(torch.float8_e4m3fn)
        self.scales = torch.ones(shape[:2], device=CUDA)
        self.table = torch.randperm(shape[0], device=CUDA).view(requests, columns).int()
        tokens = requests * query_len
        self.starts = torch.arange(0, tokens + 1, query_len, device=CUDA, dtype=torch.int32)
        self.seq_lens = torch.full((requests,), seq_len, device=CUDA, dtype=torch.int32)
        self.query = torch.randint(-1, 2, (tokens, heads, size), device=CUDA).to(DTYPE)
        self.weights = torch.randint(-1, 3, (tokens, heads), device=CUDA).float()
        self.out = torch.empty(tokens, 1, TOKENS.max_blocks, device=CUDA, dtype=torch.int32)
        self.dense_keys = self.key[:columns].flatten(0, 1).to(DTYPE)
        self.query_len, self.seq_len = query_len, seq_len

    def select(self, number: int) -> torch.Tensor:
        """The Triton operation."""
        select_keys(
            self.query, self.weights, self.key, self.scales, self.table, self.starts, self.seq_lens,
            TOKENS, max_query_len=self.query_len, max_seq_len=self.seq_len, out=self.out,
        )  # fmt: skip
        return self.out

    def product(self, number: int) -> torch.Tensor:
        """A matrix product in bfloat16 with the scores of 128 queries."""
        return self.query.flatten(0, 1)[: 64 * 128] @ self.dense_keys.T

    def check(self) -> float:
        """Compare the lists of the last query tokens of a request with those of torch."""
        rows = min(4, self.query_len)
        tokens = slice(int(self.starts[1]) - rows, int(self.starts[1]))
        expected = torch.empty_like(self.out[tokens])
        torch_select_keys(
            self.query[tokens], self.weights[tokens], self.key, self.scales, self.table[:1],
            torch.tensor([0, rows], device=CUDA, dtype=torch.int32), self.seq_lens[:1], TOKENS,
            max_query_len=rows, max_seq_len=self.seq_len, out=expected,
        )  # fmt: skip
        different = int((self.select(0)[tokens] != expected).sum())
        assert not different, f"{different} selected keys differ from torch"
        return 0.0


def measure(calls: dict[str, Any], copies: int, graph: bool) -> dict[str, float]:
    """Microseconds of each call."""
    expected = {name: warm_up(call, CUDA) for name, call in calls.items()}
    timer = GraphTimer if graph else EagerTimer
    timers = {name: timer(call, copies, CUDA, expected[name]) for name, call in calls.items()}
    return {name: round(m.us, 2) for name, m in measure_in_turn(timers, expected).items()}


def _decode(requests: int, seq_len: int) -> dict[str, Any]:
    batch = Batch(requests, 1, seq_len, latent=False)
    return _result(batch, {"selected": batch.selected}, graph=True)


def _prefill(seq_len: int) -> dict[str, Any]:
    batch = Batch(1, seq_len, seq_len, latent=False)
    return _result(batch, {"selected": batch.selected, "dense": batch.dense}, graph=False)


def _latent(requests: int, query_len: int, seq_len: int, heads: int) -> dict[str, Any]:
    batch = Batch(requests, query_len, seq_len, latent=True, heads=heads)
    calls = {"selected": batch.selected}
    if flash_mla_sparse_fwd is not None:
        calls["flash_mla"] = batch.flash_mla
    return _result(batch, calls, graph=True)


def _indexer(requests: int, query_len: int) -> dict[str, Any]:
    batch = IndexBatch(requests, query_len, 128 << 10)
    calls = {"select": batch.select}
    if query_len > 1:
        calls["product of 128 queries"] = batch.product
    return _result(batch, calls, graph=query_len == 1)


def _result(batch: Any, calls: dict[str, Any], graph: bool) -> dict[str, Any]:
    error = batch.check()
    us = measure(calls, len(getattr(batch, "lists", [0])), graph)
    return {"us": us, "max_error": error}


ROWS = {
    **{
        f"latent {requests * query_len} queries, {heads} heads, 2048 of {seq_len >> 10}k": partial(
            _latent, requests, query_len, seq_len, heads
        )
        for requests, query_len, seq_len, heads in (
            (32, 1, 128 << 10, 64), (1, 4096, 32 << 10, 128), (1, 4096, 32 << 10, 64),
            (1, 4096, 32 << 10, 16),
        )
    },
    **{
        f"decode {requests} x {seq_len >> 10}k": partial(_decode, requests, seq_len)
        for requests in (1, 8)
        for seq_len in (32 << 10, 128 << 10, 1 << 20)
    },
    **{
        f"prefill {seq_len >> 10}k": partial(_prefill, seq_len)
        for seq_len in (32 << 10, 128 << 10)
    },
    **{
        f"indexer {requests * query_len} queries, 2048 of 128k": partial(
            _indexer, requests, query_len
        )
        for requests, query_len in ((1, 4096), (32, 1), (1, 1))
    },
}  # fmt: skip


def main() -> int:
    """Check and time the chosen rows."""
    return rows.run(rows.parser(__doc__).parse_args(), ROWS, lambda row: ROWS[row]())


if __name__ == "__main__":
    sys.exit(main())
