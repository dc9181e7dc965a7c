"""The correctness check before timing: a backend whose output is wrong gets a reason and no time.

`attnlib verify` runs the whole conformance suite. This check covers the tensors that are timed:
every output element must be finite, and selected rows must be within the error budget of the
float64 oracle, or within the error of float8 queries where the case permits them. Rows are
selected at the ends of requests, at random, and where backends differ most. The oracle computes a
causal row as a batch of one query over the keys up to its position, so a row of a long prefill
costs as much as a decode.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.bench.entries import own_and_entries
from attnlib.bench.inputs import CaseInputs
from attnlib.bench.key_lists import selected_mask
from attnlib.cache.storage import PagedKVCache
from attnlib.testing.budget import FLOAT8_QUERY_ERROR, Comparison, compare, relative_error
from attnlib.testing.kv_rotation import rotate_reference
from attnlib.testing.layouts import read_slots, write_slots
from attnlib.testing.oracle import OracleParams, unpaged_attention
from attnlib.testing.page_formats import dequantize_tokens

__all__ = ["CorrectnessCheck", "contested_rows", "sample_rows"]


@dataclass(frozen=True)
class _Expected:
    """Oracle rows `[n, Hq, Dv]`: in float64, and computed in the dtype of the case for the error
    budget.
    """

    exact: torch.Tensor
    same_precision: torch.Tensor


def sample_rows(query_lens: Sequence[int], limit: int, seed: int = 0) -> list[int]:
    """Row numbers to check, at most `limit`: both ends of the first, last and some other requests,
    then random rows.
    """
    starts = [0, *accumulate(query_lens)]
    nonempty = [request for request, length in enumerate(query_lens) if length]
    draw = random.Random(seed)
    others = draw.sample(nonempty, min(len(nonempty), limit // 4))
    rows: dict[int, None] = {}
    for request in [*nonempty[:1], *nonempty[-1:], *others]:
        rows.setdefault(starts[request])
        rows.setdefault(starts[request + 1] - 1)
    for row in draw.sample(range(starts[-1]), min(starts[-1], limit)):
        rows.setdefault(row)
    return list(rows)[:limit]


def contested_rows(one: torch.Tensor, other: torch.Tensor, limit: int) -> list[int]:
    """Rows where two outputs `[T, Hq, Dv]` differ most, at most `limit`."""
    step = 1024  # rows at a time: the float32 difference of a long prefill would take gigabytes
    chunks = [slice(start, start + step) for start in range(0, len(one), step)]
    difference = torch.cat(
        [(one[rows].float() - other[rows].float()).abs().amax(dim=(1, 2)) for rows in chunks]
    )
    return [int(row) for row in difference.topk(min(limit, len(difference))).indices]


def _compare_float8(output: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compare outputs whose queries and weights may be rounded to e4m3, in decodes as well."""
    error = relative_error(output, expected)
    passed = error < FLOAT8_QUERY_ERROR
    mismatch = f"relative error {error:.3g}, at most {FLOAT8_QUERY_ERROR} with float8 queries"
    return Comparison("out", passed, mismatch="" if passed else mismatch)


class CorrectnessCheck:
    """Checks outputs and cache writes of one case.

    Args:
        inputs: the tensors that will be timed.
        max_rows: the number of rows to compare with the oracle.
    """

    def __init__(self, inputs: CaseInputs, max_rows: int = 64) -> None:
        self._inputs = inputs
        self._rows = sample_rows(inputs.case.batch.query_lens, max_rows)
        self._expected: dict[tuple[int, ...], _Expected] = {}

    def output(self, output: torch.Tensor, rows: Sequence[int] | None = None) -> Comparison:
        """Compare an output `[T, Hq, Dv]` with the oracle at `rows`, by default at the sampled
        rows.
        """
        broken = ~torch.isfinite(output).all(dim=2).all(dim=1)
        if bool(broken.any()):
            row, count = int(broken.int().argmax()), int(broken.sum())
            mismatch = (
                f"{count} rows hold NaN or infinity, or were never written, the first is {row}"
            )
            return Comparison("out", False, mismatch=mismatch)
        chosen = tuple(self._rows if rows is None else rows)
        if chosen not in self._expected:
            self._expected[chosen] = self._oracle_rows(chosen)
        expected = self._expected[chosen]
        index = torch.tensor(chosen, device=output.device)
        if self._inputs.case.fp8_queries:
            return _compare_float8(output[index], expected.exact)
        dtype = self._inputs.spec.dtype
        return compare(output[index], expected.exact, expected.same_precision, dtype)

    def cache_write(self, impl: AttentionImpl) -> Comparison:
        """Check that the backend writes the keys and values of this step to their slots.

        Restores the cache.
        """
        inputs, cache = self._inputs, self._inputs.caches[0]
        if inputs.case.unpaged:  # nothing is written
            return Comparison("cache write", True)
        if cache.page_format is not None:
            return self._page_write(impl, cache)
        views = (cache.key_cache, cache.value_cache)
        slots = inputs.slots.tolist()
        before = [read_slots(view, slots).to(torch.float64) for view in views]
        for view, tokens in zip(views, before, strict=True):
            write_slots(view, slots, torch.zeros_like(tokens), 1.0)
        impl.write_kv(inputs.key, inputs.value, cache, inputs.slots)
        after = [read_slots(view, slots).to(torch.float64) for view in views]
        for view, tokens in zip(views, before, strict=True):
            write_slots(view, slots, tokens, 1.0)
        wrong = [
            name
            for name, a, b in zip(("keys", "values"), before, after, strict=True)
            if not torch.equal(a, b)
        ]
        mismatch = f"{' and '.join(wrong)} are not in their slots" if wrong else ""
        return Comparison("cache write", not wrong, mismatch=mismatch)

    def _page_write(self, impl: AttentionImpl, cache: PagedKVCache) -> Comparison:
        """`cache_write` for pages that hold their scales: the stored bits must be those of the
        reference operation (M16)."""
        inputs = self._inputs
        at = inputs.slots // cache.block_size, inputs.slots % cache.block_size
        views = [_bits(view) for view in cache.block_views]
        before = [view[at] for view in views]
        for view in views:
            view[at] = 0
        impl.write_kv(inputs.key, inputs.value, cache, inputs.slots)
        after = [view[at] for view in views]
        for view, stored in zip(views, before, strict=True):
            view[at] = stored
        names = ("keys", "values", "scales of keys", "scales of values")
        wrong = [
            name for name, a, b in zip(names, before, after, strict=True) if not torch.equal(a, b)
        ]
        mismatch = f"{' and '.join(wrong)} are not in their slots" if wrong else ""
        return Comparison("cache write", not wrong, mismatch=mismatch)

    def _oracle_rows(self, rows: Sequence[int]) -> _Expected:
        exact: list[torch.Tensor] = []
        same_precision: list[torch.Tensor] = []
        params, dtype = self._inputs.params, self._inputs.spec.dtype
        for row in rows:
            query, key, value, request = self._row(row)
            own, rotation = _of_request(params, request), self._inputs.case.kv_rotation
            query = rotate_reference(query, rotation, "keys")
            if self._inputs.compressed_keys:
                entries = self._inputs.compressed_keys[0]
                key, value = own_and_entries(key, value, self._inputs.spec, entries, row)
                own = replace(own, causal=False, window=(-1, -1))
            selection = self._inputs.case.key_selection
            if selection is not None:
                lists = self._inputs.selected_keys[0]
                mask = selected_mask(lists, selection, row, query.shape[1], len(key))
                own = replace(own, selected=(mask,))
            query_ends, key_ends = torch.tensor([0, 1]), torch.tensor([0, len(key)])
            for found, precision in ((exact, torch.float64), (same_precision, dtype)):
                result = unpaged_attention(query, key, value, query_ends, key_ends, own, precision)
                found.append(rotate_reference(result.out, rotation, "values", inverse=True))
        return _Expected(torch.cat(exact), torch.cat(same_precision))

    def _row(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """One query `[1, Hq, D]`, the keys and values up to its own position, or all where the
        layer is not causal, and its request."""
        inputs = self._inputs
        batch, block_size = inputs.case.batch, inputs.case.block_size
        ends = list(accumulate(batch.query_lens))
        request = next(index for index, end in enumerate(ends) if row < end)
        length = batch.seq_lens[request]
        if inputs.case.causal:
            length -= ends[request] - 1 - row
        assert inputs.common.block_table_tensor is not None  # every case is paged
        blocks = inputs.common.block_table_tensor[request, : -(-length // block_size)].long()
        cache = inputs.caches[0]
        key, value, *scales = (_gather(view, blocks, length) for view in cache.block_views)
        if scales:  # in the pages
            names = (inputs.spec.kv_format.name, inputs.spec.value_format.name)
            key, value = map(dequantize_tokens, (key, value), scales, names)
        return inputs.query[row : row + 1], key, value, request


def _of_request(params: OracleParams, request: int) -> OracleParams:
    """The parameters for a batch that consists of one row of this request."""
    score = params.score
    if score is None:
        return params
    return replace(params, score=lambda _, *scores: score(request, *scores))


def _bits(view: torch.Tensor) -> torch.Tensor:
    """A view whose elements can be indexed and compared as bits on every device."""
    return view.view(torch.uint8 if view.element_size() == 1 else view.dtype)


def _gather(view: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """`[length, Hkv, D]` from the blocks of a cache `[B, N, Hkv, D]`."""
    raw = view.view(torch.uint8) if view.element_size() == 1 else view
    return raw.index_select(0, blocks).reshape(-1, *raw.shape[2:])[:length].view(view.dtype)
