"""M14: the Triton indexer equals the torch indexer where scores are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.cache import index_keys
from attnlib.errors import ContractError
from attnlib.ops.torch import key_indexer as torch_operation
from attnlib.ops.torch.cache_write import write_kv as torch_write_kv
from attnlib.ops.triton import key_indexer as triton_operation
from attnlib.ops.triton.cache_write import write_kv as triton_write_kv
from attnlib.ops.triton.heuristics import index_chunks
from attnlib.sparse.key_selection import KeySelection


def _inputs(
    seed: int, heads: int, size: int, with_weights: bool, dtype: torch.dtype
) -> tuple[list[Any], int]:
    """Integers, whose scores are exact and often equal; two rows past the last request."""
    generator = torch.Generator().manual_seed(seed)
    query_lens, seq_lens = [5, 1, 7, 0], [60, 41, 7, 3]
    tokens = sum(query_lens) + 2

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).float()

    query = integers(-2, 3, tokens, heads, size)
    weights = integers(-1, 3, tokens, heads) if with_weights else None
    keys = integers(-1, 2, 40, 8, size).to(dtype)
    scales = integers(1, 3, 40, 8) if dtype == torch.float8_e4m3fn else None
    table = torch.randperm(40, generator=generator)[:32].view(4, 8).int()
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return [query, weights, keys, scales, table, starts, torch.tensor(seq_lens).int()], tokens


@pytest.mark.parametrize("with_weights", [True, False], ids=["one list", "list per head"])
@pytest.mark.parametrize(
    ("block_size", "max_blocks"),
    [
        (1, 5),
        pytest.param(4, 3, marks=pytest.mark.slow),
        pytest.param(16, 2, marks=pytest.mark.slow),
        (3, 50),
    ],
)
@pytest.mark.parametrize(
    ("heads", "size", "dtype", "local_blocks"),
    [(4, 16, torch.float32, 0), (3, 24, torch.float8_e4m3fn, 2)],
    ids=["float32", "float8"],
)
def test_it_equals_torch(
    with_weights: bool,
    block_size: int,
    max_blocks: int,
    heads: int,
    size: int,
    dtype: torch.dtype,
    local_blocks: int,
) -> None:
    inputs, tokens = _inputs(block_size, heads, size, with_weights, dtype)
    selection = KeySelection(max_blocks=max_blocks, block_size=block_size)
    shape = (tokens, 1 if with_weights else heads, max_blocks)
    found = []
    for operation in (torch_operation, triton_operation):
        out = torch.full(shape, 7, dtype=torch.int32)
        operation.select_keys(
            *inputs, selection, local_blocks=local_blocks, max_query_len=7, max_seq_len=61, out=out
        )
        found.append(out)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float16, torch.float16),
        (torch.float16, torch.float8_e4m3fn),
    ],
)
def test_the_same_call_twice_gives_the_same_lists(dtype: torch.dtype, stored: torch.dtype) -> None:
    """M14; scores with rounding errors. bfloat16 is tested on a GPU (tests/gpu): the interpreter
    computes wrong products of it."""
    inputs, tokens = _inputs(3, 4, 16, True, stored)
    generator = torch.Generator().manual_seed(0)
    inputs[0] = torch.randn(inputs[0].shape, generator=generator).to(dtype)
    inputs[1] = torch.rand(inputs[1].shape, generator=generator)
    found = []
    for fill in (7, -9):
        out = torch.full((tokens, 1, 5), fill, dtype=torch.int32)
        triton_operation.select_keys(
            *inputs, KeySelection(max_blocks=5), max_query_len=7, max_seq_len=61, out=out
        )
        found.append(out)
    assert torch.equal(*found) and (found[0] >= 0).any()


def test_chunks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace is bounded: larger batches are computed in parts."""
    inputs, tokens = _inputs(0, 4, 16, True, torch.float32)
    found = []
    for most in (1 << 26, 1000, 1):
        monkeypatch.setattr(index_chunks, "_MAX_SCORES", most)
        out = torch.full((tokens, 1, 6), 7, dtype=torch.int32)
        triton_operation.select_keys(
            *inputs, KeySelection(max_blocks=6), max_query_len=7, max_seq_len=61, out=out
        )
        found.append(out)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_workspace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile has fewer query tokens where those of 16 do not fit; one token is the least."""
    inputs, tokens = _inputs(0, 4, 16, False, torch.float32)
    out = torch.empty(tokens, 4, 6, dtype=torch.int32)
    selection = KeySelection(max_blocks=6)
    sizes, own = [], torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.float32 and len(shape) == 1:
            sizes.append(shape[0])
        return own(*shape, **options)

    found = []
    for most in (1 << 26, 4000, 4 * 61 * 3, 4 * 61, 10):
        monkeypatch.setattr(index_chunks, "_MAX_SCORES", most)
        with monkeypatch.context() as patch:
            patch.setattr(triton_operation.torch, "empty", empty)
            triton_operation.select_keys(
                *inputs, selection, max_query_len=7, max_seq_len=61, out=out
            )
        found.append(out.clone())
        assert sizes[-1] <= max(most, 4 * 61)
    assert sizes[-4:] == [3904, 488, 244, 244]
    assert all(torch.equal(lists, found[0]) for lists in found)
    monkeypatch.undo()
    form = index_chunks._tokens_of_tile
    assert (form(1 << 22, 1000), form(1 << 23, 1000), form(1 << 27, 1000)) == (16, 8, 1)


def test_tensors_that_kernels_cannot_address_are_refused() -> None:
    inputs, tokens = _inputs(0, 4, 16, True, torch.float32)
    out = torch.empty(tokens, 1, 4, dtype=torch.int32)
    bounds: dict[str, Any] = {"max_query_len": 7, "max_seq_len": 61}
    selection = KeySelection(max_blocks=4)
    with pytest.raises(ContractError, match="index queries are torch.float64"):
        triton_operation.select_keys(inputs[0].double(), *inputs[1:], selection, out=out, **bounds)
    strided = torch.empty(tokens, 1, 8, dtype=torch.int32)[..., ::2]
    with pytest.raises(ContractError, match="out of the indexer has last stride 2"):
        triton_operation.select_keys(*inputs, selection, out=strided, **bounds)
    with pytest.raises(ContractError, match="at most 4096 tokens"):
        triton_operation.select_keys(
            *inputs, KeySelection(max_blocks=4, block_size=8192), out=out, **bounds
        )
    with pytest.raises(ContractError, match="max_seq_len=9000000 needs 70313 tiles of 128 blocks"):
        triton_operation.select_keys(
            *inputs, selection, out=out, max_query_len=7, max_seq_len=9_000_000
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_the_triton_cache_write_serves_index_keys(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4: keys and their scales, with a slot of -1."""
    keys, slots = torch.randn(5, 24), torch.tensor([3, -1, 0, 9, 4])
    written = []
    for operation in (torch_write_kv, triton_write_kv):
        monkeypatch.setattr(index_keys, "operation", lambda *_, found=operation: found)
        cache = index_keys.IndexKeyCache.allocate(3, 4, 24, dtype, "cpu")
        cache.write(keys, slots)
        written.append(cache)
    assert torch.equal(written[0].keys.float(), written[1].keys.float())
    assert written[0].keys.float().abs().sum() > 0
    if written[0].scales is not None and written[1].scales is not None:
        assert torch.equal(written[0].scales, written[1].scales)
        assert (written[0].scales > 0).sum() == 4
