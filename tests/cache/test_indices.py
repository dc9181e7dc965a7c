"""Conversions between block tables, CSR page lists, token slots, read and write indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import attnlib
from attnlib.cache import indices as convert
from attnlib.cache import page_lists, ragged, token_indices, token_slots
from attnlib.errors import ContractError
from attnlib.ops import addresses

DTYPES = (torch.int32, torch.int64)


@dataclass
class Batch:
    """One batch in every form, from plain lists."""

    block_size: int
    seq_lens: list[int]
    query_lens: list[int]
    blocks: list[list[int]]
    columns: int
    """Columns of the block table; rows may be narrower."""

    @property
    def width(self) -> int:
        return self.columns * self.block_size

    @property
    def slots(self) -> list[list[int]]:
        size = self.block_size
        return [
            [row[position // size] * size + position % size for position in range(length)]
            for row, length in zip(self.blocks, self.seq_lens, strict=True)
        ]

    def table(self, dtype: torch.dtype, fill: int = -1) -> torch.Tensor:
        return _padded(self.blocks, self.columns, dtype, fill)

    def token_slots(self, dtype: torch.dtype, fill: int = -1) -> torch.Tensor:
        return _padded(self.slots, self.width, dtype, fill)

    def lengths(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(self.seq_lens, dtype=dtype)

    def starts(self, dtype: torch.dtype) -> torch.Tensor:
        return _offsets(self.query_lens, dtype)

    @property
    def written(self) -> list[int]:
        return [
            slot
            for row, query in zip(self.slots, self.query_lens, strict=True)
            for slot in row[len(row) - query :]
        ]


def _padded(rows: list[list[int]], width: int, dtype: torch.dtype, fill: int) -> torch.Tensor:
    full = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(full, dtype=dtype).reshape(len(rows), width)


def _offsets(lengths: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


@st.composite
def batches(draw: Any) -> Batch:
    size = draw(st.integers(1, 5))
    seq_lens = draw(st.lists(st.integers(0, 17), max_size=4))
    query_lens = [draw(st.integers(0, length)) for length in seq_lens]
    counts = [-(-length // size) for length in seq_lens]
    ids = iter(draw(st.permutations(range(sum(counts) + 3))))
    blocks = [[next(ids) for _ in range(count)] for count in counts]
    columns = max(counts, default=0) + draw(st.integers(0, 2))
    return Batch(size, seq_lens, query_lens, blocks, columns)


each_dtype = given(batches(), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 3))
quick = settings(max_examples=60)


@each_dtype
@quick
def test_block_table_and_csr(batch: Batch, given_: torch.dtype, made: torch.dtype, more: int):
    """Entries past a request's blocks are never read: the table is filled with large ids."""
    table, lengths = batch.table(given_, fill=10**6), batch.lengths(given_)
    pages = [page for row in batch.blocks for page in row]
    found = convert.block_table_to_csr(
        table, lengths, batch.block_size, max_pages=len(pages) + more, dtype=made
    )
    assert {tensor.dtype for tensor in found} == {made}
    assert torch.equal(found.indptr, _offsets([len(row) for row in batch.blocks], made))
    assert found.indices.tolist() == pages + [-1] * more
    assert found.last_page_len.tolist() == [
        length - (len(row) - 1) * batch.block_size if row else 0
        for row, length in zip(batch.blocks, batch.seq_lens, strict=True)
    ]
    unbounded = convert.block_table_to_csr(table, lengths, batch.block_size)
    assert unbounded.indices.shape == (table.numel(),)
    back = convert.csr_to_block_table(found.indptr, found.indices, batch.columns, dtype=given_)
    assert torch.equal(back, batch.table(given_))
    again = convert.csr_seq_lens(found.indptr, found.last_page_len, batch.block_size, dtype=given_)
    assert torch.equal(again, lengths)


@each_dtype
@quick
def test_block_table_and_token_slots(batch: Batch, given_: torch.dtype, made: torch.dtype, more):
    table, lengths = batch.table(given_, fill=10**6), batch.lengths(given_)
    found = convert.block_table_to_token_slots(table, lengths, batch.block_size, dtype=made)
    assert torch.equal(found, batch.token_slots(made))
    wider = convert.block_table_to_token_slots(
        table, lengths, batch.block_size, max_seq_len=batch.width + more, dtype=made
    )
    assert torch.equal(wider, _padded(batch.slots, batch.width + more, made, -1))
    back = convert.token_slots_to_block_table(found, lengths, batch.block_size, dtype=given_)
    assert torch.equal(back, batch.table(given_))


@each_dtype
@quick
def test_csr_and_token_slots(batch: Batch, given_: torch.dtype, made: torch.dtype, more: int):
    slots, lengths = batch.token_slots(given_, fill=10**6), batch.lengths(given_)
    pages = convert.token_slots_to_csr(slots, lengths, batch.block_size, dtype=made)
    direct = convert.block_table_to_csr(batch.table(given_), lengths, batch.block_size, dtype=made)
    assert all(torch.equal(*pair) for pair in zip(pages, direct, strict=True))
    back = convert.csr_to_token_slots(*pages, batch.block_size, batch.width + more, dtype=given_)
    assert torch.equal(back, _padded(batch.slots, batch.width + more, given_, -1))


@each_dtype
@quick
def test_token_slots_and_read_indices(batch: Batch, given_: torch.dtype, made: torch.dtype, more):
    slots, lengths = batch.token_slots(given_, fill=10**6), batch.lengths(given_)
    flat = [slot for row in batch.slots for slot in row]
    found = convert.token_slots_to_read_indices(
        slots, lengths, max_indices=len(flat) + more, dtype=made
    )
    assert found.indices.tolist() == flat + [-1] * more and found.indices.dtype == made
    assert torch.equal(found.cu_seqlens, _offsets(batch.seq_lens, made))
    back = convert.read_indices_to_token_slots(*found, batch.width, dtype=given_)
    assert torch.equal(back, batch.token_slots(given_))


@each_dtype
@quick
def test_token_slots_and_write_indices(batch: Batch, given_: torch.dtype, made: torch.dtype, more):
    slots, lengths = batch.token_slots(given_, fill=10**6), batch.lengths(given_)
    starts = batch.starts(given_)
    found = convert.token_slots_to_write_indices(
        slots, starts, lengths, len(batch.written) + more, dtype=made
    )
    assert found.tolist() == batch.written + [-1] * more and found.dtype == made
    context = [
        row[: len(row) - query] + [-1] * query
        for row, query in zip(batch.slots, batch.query_lens, strict=True)
    ]
    before = _padded(context, batch.width, given_, -1)
    kept = before.clone()
    after = convert.write_indices_to_token_slots(found, starts, lengths, before)
    assert torch.equal(after, batch.token_slots(given_)) and torch.equal(before, kept)


@given(batches())
@quick
def test_write_indices_are_the_slot_mapping(batch: Batch) -> None:
    """P4: the slots that `from_lengths` computes for a layer."""
    common = attnlib.CommonAttentionMetadata.from_lengths(
        batch.query_lens, batch.seq_lens, batch.table(torch.int32), batch.block_size, "cpu"
    )
    found = convert.token_slots_to_write_indices(
        batch.token_slots(torch.int64), common.query_start_loc, common.seq_lens, len(batch.written)
    )
    assert common.slot_mapping is not None and torch.equal(found, common.slot_mapping)


def test_slots_beyond_2_to_the_31() -> None:
    table, length = torch.tensor([[2**30]], dtype=torch.int32), torch.tensor([3])
    slots = convert.block_table_to_token_slots(table, length, 16)
    assert slots[0, :4].tolist() == [2**34, 2**34 + 1, 2**34 + 2, -1]
    assert convert.token_slots_to_block_table(slots, length, 16).tolist() == [[2**30]]


BATCH = Batch(4, [9, 0, 4], [1, 0, 4], [[7, 2, 5], [], [3]], 3)


def _calls(device: str) -> dict[str, Callable[[], Any]]:
    table, slots, lengths, starts = (
        x.to(device)
        for x in (BATCH.table(torch.int32), BATCH.token_slots(torch.int64),
                  BATCH.lengths(torch.int32), BATCH.starts(torch.int32))
    )  # fmt: skip
    indptr, pages, last = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in ([0, 3, 3, 4], [7, 2, 5, 3, -1], [1, 0, 4])
    )
    written = torch.tensor(BATCH.written, device=device)
    flat = torch.arange(13, device=device)
    ends = torch.tensor([0, 9, 9, 13], device=device)
    return {
        "block_table_to_csr": lambda: convert.block_table_to_csr(table, lengths, 4),
        "csr_to_block_table": lambda: convert.csr_to_block_table(indptr, pages, 3),
        "csr_seq_lens": lambda: convert.csr_seq_lens(indptr, last, 4),
        "block_table_to_token_slots": lambda: convert.block_table_to_token_slots(table, lengths, 4),
        "token_slots_to_block_table": lambda: convert.token_slots_to_block_table(slots, lengths, 4),
        "csr_to_token_slots": lambda: convert.csr_to_token_slots(indptr, pages, last, 4, 12),
        "token_slots_to_csr": lambda: convert.token_slots_to_csr(slots, lengths, 4),
        "token_slots_to_read_indices": lambda: convert.token_slots_to_read_indices(slots, lengths),
        "read_indices_to_token_slots": lambda: convert.read_indices_to_token_slots(flat, ends, 12),
        "token_slots_to_write_indices": lambda: convert.token_slots_to_write_indices(
            slots, starts, lengths, 8
        ),
        "write_indices_to_token_slots": lambda: convert.write_indices_to_token_slots(
            written, starts, lengths, slots
        ),
    }


class _NoSync(TorchDispatchMode):
    """Refuses operators that wait for the device, or whose shape depends on values."""

    refused = (
        "_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor",
        "is_nonzero", "equal", "item",
    )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        assert not name.startswith(self.refused), f"{name} synchronizes"
        if name.startswith(("index.", "index_put")):
            for part in args[1]:
                assert part is None or part.dtype != torch.bool, f"{name} by a mask synchronizes"
        return func(*args, **(kwargs or {}))


@contextmanager
def _forbidden() -> Iterator[None]:
    with _NoSync():
        yield


def test_every_conversion_is_listed_here() -> None:
    functions = {name for name in convert.__all__ if name[0].islower()}
    assert functions == _calls("cpu").keys()


@pytest.mark.parametrize("name", _calls("cpu"))
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_conversion_synchronizes(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a meta device there are no values to read at all. Checks of values are for a CPU."""
    expected = _calls("cpu")[name]()
    for module in (addresses, page_lists, ragged, token_indices, token_slots):
        monkeypatch.setattr(module, "are_readable", lambda tensor: False)
    call = _calls(device)[name]
    with _forbidden():
        found = call()
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found)), strict=True)
    for one, other in pairs:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert other.device.type == device


def test_the_test_finds_a_sync() -> None:
    with pytest.raises(AssertionError, match="_local_scalar_dense"), _forbidden():
        int(torch.ones(1)[0])
    with pytest.raises(AssertionError, match="synchronizes"), _forbidden():
        torch.arange(3)[torch.ones(3, dtype=torch.bool)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", _calls("cpu"))
def test_on_a_gpu_nothing_synchronizes(name: str) -> None:
    expected, call = _calls("cpu")[name](), _calls("cuda")[name]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found)), strict=True)
    assert all(torch.equal(one, other.cpu()) for one, other in pairs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, n: convert.block_table_to_csr(t, n, 0), "block_size=0 must be at least 1"),
        (lambda t, n: convert.block_table_to_csr(t, n[:1], 4), "seq_lens describes 1 requests"),
        (lambda t, n: convert.block_table_to_csr(t.float(), n, 4), "block_table is torch.float32"),
        (lambda t, n: convert.block_table_to_csr(t, n, 4, dtype=torch.int16), "dtype=torch.int16"),
        (lambda t, n: convert.block_table_to_csr(t, n, 4, max_pages=-1), "max_pages=-1"),
        (lambda t, n: convert.block_table_to_csr(t, n.to("meta"), 4), "seq_lens is on meta"),
        (lambda t, n: convert.block_table_to_csr(t, None, 4), "seq_lens is a NoneType"),
        (lambda t, n: convert.block_table_to_csr(t, n, 10**30), "block_size=1000.* below 2\\^63"),
        (lambda t, n: convert.csr_to_block_table(n[:0], n, 4), "indptr is empty"),
        (lambda t, n: convert.csr_seq_lens(n, n, 4), "last_page_len describes 3 requests"),
        (lambda t, n: convert.token_slots_to_block_table(n, n, 4), "with 2 dimensions"),
        (
            lambda t, n: convert.token_slots_to_write_indices(t, n, n, 4),
            "query_start_loc describes",
        ),
    ],
)
def test_other_arguments_are_refused(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        call(BATCH.table(torch.int32), BATCH.lengths(torch.int32))


INTS = lambda *values: torch.tensor(values)  # noqa: E731  # short
TABLE, LENGTHS = INTS([7, 2], [3, -1]), INTS(9, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convert.block_table_to_csr(TABLE, LENGTHS, 4), "needs 3 blocks of 4 tokens"),
        (lambda: convert.block_table_to_csr(TABLE, INTS(-1, 3), 4), r"seq_lens\[0\]=-1"),
        (lambda: convert.block_table_to_csr(TABLE, INTS(8, 5), 4), r"block_table\[1\]\[1\]=-1"),
        (
            lambda: convert.block_table_to_csr(TABLE, INTS(8, 3), 4, max_pages=2),
            "max_pages=2 is too small: the values need 3",
        ),
        (lambda: convert.csr_to_block_table(INTS(0, 3), INTS(1, 2), 4), "past the 2 rows"),
        (lambda: convert.csr_to_block_table(INTS(0, 2, 1), INTS(1, 2), 4), "falls from 2 to 1"),
        (lambda: convert.csr_to_block_table(INTS(1, 2), INTS(1, 2), 4), r"indptr\[0\]=1"),
        (lambda: convert.csr_to_block_table(INTS(0, 2), INTS(1, 2), 1), "max_blocks=1 is too"),
        (lambda: convert.csr_seq_lens(INTS(0, 2), INTS(5), 4), r"last_page_len\[0\]=5 must be"),
        (lambda: convert.csr_seq_lens(INTS(0, 2), INTS(0), 4), r"last_page_len\[0\]=0 must be"),
        (
            lambda: convert.block_table_to_token_slots(TABLE, INTS(8, 3), 4, max_seq_len=7),
            r"seq_lens\[0\]=8 must be from 0 to 7, max_seq_len",
        ),
        (
            lambda: convert.token_slots_to_block_table(INTS([8, 9, 11, 10]), INTS(4), 4),
            r"token_slots\[0\]\[2\]=11",
        ),
        (
            lambda: convert.token_slots_to_block_table(INTS([9, 10]), INTS(2), 4),
            r"token_slots\[0\]\[0\]=9",
        ),
        (lambda: convert.token_slots_to_csr(INTS([8, -1]), INTS(2), 4), r"\[0\]\[1\]=-1"),
        (lambda: convert.token_slots_to_read_indices(INTS([8, 9]), INTS(3)), "from 0 to 2"),
        (
            lambda: convert.read_indices_to_token_slots(INTS(4, 5), INTS(0, 3), 4),
            "cu_seqlens ends at 3",
        ),
        (
            lambda: convert.token_slots_to_write_indices(INTS([8, 9]), INTS(0, 3), INTS(2), 3),
            r"seq_lens\[0\]=2 is below the 3 new tokens",
        ),
        (
            lambda: convert.token_slots_to_write_indices(INTS([8, 9]), INTS(0, 2), INTS(2), 1),
            "query_start_loc ends at 2, past the 1 rows",
        ),
        (
            lambda: convert.write_indices_to_token_slots(
                INTS(4), INTS(0, 2), INTS(2), INTS([8, 9])
            ),
            "query_start_loc ends at 2, past the 1 rows",
        ),
        (lambda: convert.csr_seq_lens(INTS(0, 2), INTS(3), 2.5), "block_size 2.5 is a float"),
    ],
)
def test_values_are_checked_on_a_cpu(call: Callable[[], Any], message: str) -> None:
    """Lists past their end, lengths past a table, and results that do not fit."""
    with pytest.raises(ContractError, match=message):
        call()
