"""K8: operations on the cache that no attention layer runs: slots, appends, packed cache writes.

Slots (`compute_slot_mapping`, P3 and P4) and the new lengths of an append (`append_kv`) are
compared as integers, and written caches bit for bit, over all of their memory. Cases are
unsupported where a backend has no such operation (`AttentionBackend.get_operation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import find_operation

__all__ = ["CHECKS"]

_Lengths = list[tuple[int, int]]
"""(query_len, seq_len) of each request."""

_SLOTS: dict[str, tuple[int, int, _Lengths]] = {
    "mixed": (16, 8, [(1, 100), (20, 128), (3, 3), (1, 17), (7, 64)]),
    "empty-requests": (4, 5, [(0, 0), (2, 19), (0, 7), (0, 0), (5, 5), (0, 3)]),
    "before-position-0": (8, 3, [(5, 2), (1, 0), (12, 9), (2, 24)]),
    "past-the-table": (4, 2, [(3, 9), (1, 40), (6, 8), (9, 12)]),
    "block-size-1": (1, 9, [(4, 9), (1, 1), (2, 6)]),
    "odd-block-size": (24, 4, [(30, 70), (1, 96), (2, 24)]),
    "no-requests": (16, 4, []),
    "no-columns": (16, 0, [(2, 2), (1, 5)]),
}
"""Name -> (block size, columns of the block table, lengths)."""


def _table(rows: int, columns: int, seed: int) -> torch.Tensor:
    """A block table with every block once, a view of a wider one (P3)."""
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(seed))
    wide = torch.full((rows, columns + 3), 2**30, dtype=torch.int32)
    wide[:, :columns] = order.view(rows, columns)
    return wide[:, :columns]


def _expected_slots(
    lengths: _Lengths, table: torch.Tensor, block_size: int, padding: int
) -> list[int]:
    slots = []
    for request, (query_len, seq_len) in enumerate(lengths):
        for position in range(seq_len - query_len, seq_len):
            inside = 0 <= position < table.shape[1] * block_size
            block = int(table[request, position // block_size]) if inside else -1
            slots.append(block * block_size + position % block_size if block >= 0 else -1)
    return slots + [-1] * padding


def _check_slots(
    target: BackendUnderTest, case: Case, form: str, padding: int, given: bool, invalid: bool
) -> str:
    compute = find_operation(target.backend, "compute_slot_mapping")
    block_size, columns, lengths = _SLOTS[form]
    table = _table(len(lengths), columns, case.seed)
    if invalid:
        table[:, 1::2] = -1
    expected = _expected_slots(lengths, table, block_size, padding)
    starts = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0).int()
    seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32)
    count = len(expected)
    out = torch.full((count,), 7, dtype=torch.int64, device=target.device) if given else None
    device_tensors = (x.to(target.device) for x in (starts, seq_lens))
    wide = torch.zeros(len(lengths), columns + 3, dtype=torch.int32, device=target.device)
    wide[:, :columns] = table
    found = compute(*device_tensors, wide[:, :columns], block_size, count, out)
    if found.dtype != torch.int64 or found.shape != (count,):
        return f"slots are {found.dtype} {tuple(found.shape)}; expected int64 {(count,)}"
    if given and (out is None or found.data_ptr() != out.data_ptr()) and count:
        return "the result is not the given `out`"
    # Any negative slot writes nothing (P4).
    for token, (slot, want) in enumerate(zip(found.tolist(), expected, strict=True)):
        if max(slot, -1) != want:
            return f"token {token} has slot {slot}; expected {want} (P3) | form: {_SLOTS[form]}"
    return ""


_APPENDS: dict[str, tuple[int, int, list[int]]] = {
    "one": (16, 1, [0, 5, 31, 15, 16]),
    "several": (4, 3, [0, 5, 31, 13, 2]),
    "more-than-a-block": (4, 6, [1, 20, 4]),
    "block-size-1": (1, 3, [4, 0, 9]),
    "past-the-table": (4, 3, [31, 32, 40, 29]),
    "before-position-0": (4, 4, [-2, 3, -5]),
}
"""Name -> (block size, new tokens of each request, cached tokens); the tables have 32 positions."""


def _check_append(target: BackendUnderTest, case: Case, form: str) -> str:
    append = find_operation(target.backend, "append_kv")
    block_size, count, cached = _APPENDS[form]
    draw, dtype = torch.Generator().manual_seed(case.seed), case.torch_dtype
    columns, heads, sizes = 32 // block_size, 3, (case.head_size, case.head_size // 2)
    table = _table(len(cached), columns, case.seed)
    actual, news = [], []
    for size in sizes:
        pages = torch.randn(table.numel() + 1, heads, block_size, size, generator=draw).to(dtype)
        actual.append(pages.to(target.device).transpose(1, 2))
        tokens = torch.randn(len(cached), heads, count, size, generator=draw).to(dtype)
        news.append(tokens.to(target.device).transpose(1, 2))
    expected = [cache.clone() for cache in actual]
    for request, length in enumerate(cached):
        for token in range(count):
            position = length + token
            if 0 <= position < columns * block_size:
                block = int(table[request, position // block_size])
                for cache, new in zip(expected, news, strict=True):
                    cache[block, position % block_size] = new[request, token]
    lengths = torch.tensor(cached, dtype=torch.int32, device=target.device)
    after = torch.full_like(lengths, -77)
    append(*news, *actual, table.to(target.device), lengths, after)
    if after.tolist() != [length + count for length in cached]:
        return f"lengths after the append are {after.tolist()}, before it {cached}, {count} new"
    return _first_difference(actual, expected, form)


def _first_difference(actual: list[torch.Tensor], expected: list[torch.Tensor], form: str) -> str:
    """Describe the first elements that have other bits; caches are `[B, N, H, D]`."""
    for name, found, want in zip(("key", "value"), actual, expected, strict=True):
        bits = [x.contiguous().view(torch.uint8) for x in (found, want)]
        wrong = (bits[0] != bits[1]).nonzero()
        if len(wrong):
            block, offset, head, _ = wrong[0].tolist()
            return (
                f"{name} cache: block {block}, offset {offset}, head {head} has other bits than "
                f"expected, {len(wrong)} bytes in all (P4) | form: {form}"
            )
    return ""


_PACKED_WRITES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def _check_packed_write(
    target: BackendUnderTest, case: Case, stored: str, scales: str, skipped: bool
) -> str:
    """The packed layout of `ops.packed_cache`; numbers are small integers, exact in each format."""
    write = find_operation(target.backend, "packed_write")
    draw, dtype = torch.Generator().manual_seed(case.seed), case.torch_dtype
    cache_dtype = _PACKED_WRITES[stored] or dtype
    x, heads, size, block_size = 16 // cache_dtype.itemsize, 2, 32, 8
    factors = {
        "none": (1.0, 1.0),
        "number": (0.5, 2.0),
        "tensor": ([0.5], [2.0]),
        "heads": ([0.5, 0.25], [2.0, 0.5]),
    }[scales]
    tokens = [torch.randint(-4, 5, (9, heads, size), generator=draw).to(dtype) for _ in range(2)]
    if cache_dtype.itemsize == 1:
        tokens[0][2, 1, 5], tokens[1][3, 0, 7] = 60000.0, -60000.0  # saturate
    slots = [33, 7, -1, 16, 8, -1, 0] if skipped else [33, 7, 20, 16, 8, 31, 0]
    actual, expected, given = [], [], []
    for values, factor in zip(tokens, factors, strict=True):
        bytes_per_head = size * cache_dtype.itemsize
        pages = torch.randint(0, 100, (5, block_size, heads, bytes_per_head), generator=draw)
        pages = pages.to(torch.uint8)
        want = pages.view(cache_dtype).float()
        limit = torch.finfo(cache_dtype).max
        per_head = torch.tensor(factor).expand(heads)[:, None]
        for token, slot in enumerate(slots):
            if slot >= 0:
                real = values[token].float()
                fits = (real / per_head).clamp(-limit, limit) if cache_dtype.itemsize == 1 else real
                want[slot // block_size, slot % block_size] = fits
        actual.append(pages.view(cache_dtype))
        expected.append(want.to(cache_dtype))
        is_list = isinstance(factor, list)
        given.append(torch.tensor(factor, device=target.device) if is_list else factor)
    key = actual[0].view(5, block_size, heads, -1, x).permute(0, 2, 3, 1, 4).contiguous()
    value = actual[1].permute(0, 2, 3, 1).contiguous()
    caches = [cache.to(target.device) for cache in (key, value)]
    write(
        *(values.to(target.device) for values in tokens),
        *caches,
        torch.tensor(slots, device=target.device),
        **(dict(zip(("k_scale", "v_scale"), given, strict=True)) if scales != "none" else {}),
    )
    key, value = (cache.cpu() for cache in caches)
    found = [key.permute(0, 3, 1, 2, 4).flatten(3), value.permute(0, 3, 1, 2)]
    return _first_difference(found, expected, f"{stored}, scales: {scales}")


_VISIBLE: dict[str, tuple[int, int, int]] = {
    "narrow": (4, 20, 9),
    "equal": (3, 17, 17),
    "wide": (5, 12, 30),
    "one-row": (1, 70, 40),
}
"""Name -> rows and keys of the mask, and columns of the block table."""


def _check_visible(target: BackendUnderTest, case: Case, form: str) -> str:
    list_keys = find_operation(target.backend, "list_visible_keys")
    rows, keys, columns = _VISIBLE[form]
    distance = keys + 5
    visible = torch.rand(rows, keys, generator=torch.Generator().manual_seed(case.seed)) < 0.6
    visible[0] = form != "narrow"  # all keys, or none
    table, lengths, starts = (
        torch.full(shape, 77, dtype=torch.int32, device=target.device)
        for shape in ((rows, columns), (rows,), (rows + 1,))
    )
    list_keys(visible.to(target.device), distance, table=table, lengths=lengths, starts=starts)
    for row in range(rows):
        shown = [row * distance + key for key in range(keys) if visible[row, key]][:columns]
        expected = shown + [-1] * (columns - len(shown))
        if table[row].tolist() != expected:
            return f"row {row} lists {table[row].tolist()}; expected {expected} | form: {form}"
        if int(lengths[row]) != len(shown):
            return f"row {row} has length {int(lengths[row])}; expected {len(shown)} | form: {form}"
    if starts.tolist() != list(range(rows + 1)):
        return f"starts are {starts.tolist()}; expected 0 to {rows} | form: {form}"
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    case = target.case(contiguous=True)

    def named(name: str, run: Callable[..., str], **options: object) -> CheckCase:
        return CheckCase(name, partial(run, target, case, **options), case)

    for form in _SLOTS:
        options = {"form": form, "padding": 3 if form != "block-size-1" else 0}
        given = form in ("mixed", "no-columns")
        yield named(f"slots-{form}", _check_slots, **options, given=given, invalid=False)
    invalid = {"form": "mixed", "padding": 0, "given": False, "invalid": True}
    yield named("slots-invalid-blocks", _check_slots, **invalid)
    for form in _APPENDS:
        yield named(f"append-{form}", _check_append, form=form)
    for form in _VISIBLE:
        yield named(f"visible-keys-{form}", _check_visible, form=form)
    for stored in _PACKED_WRITES:
        for scales in ("none",) if stored == "auto" else ("none", "number", "tensor", "heads"):
            options = {"stored": stored, "scales": scales}
            skipped = scales in ("none", "heads")
            yield named(
                f"packed-{stored}-{scales}", _check_packed_write, **options, skipped=skipped
            )


CHECKS = (Check("K8", "slots, appends and packed cache writes", _cases),)
