"""The gate in front of the stopwatch: a backend whose answer is wrong gets a reason and no time.

The whole exam is `attnlib verify`. Here the very tensors that will be timed are looked at: every element must be a
number, and chosen rows must lie within the kit's error budget of the float64 oracle. Rows are chosen where kernels go
wrong (first, last, ends of requests), at random, and where backends disagree with each other most. A causal row is
a batch of its own with the keys up to its position, so a row of a long prefill costs no more than a decode.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.bench.inputs import Material
from attnlib.testing.budget import Comparison, compare
from attnlib.testing.layouts import read_slots, write_slots
from attnlib.testing.oracle import unpaged_attention

__all__ = ["Gate", "choose_rows", "contested_rows"]


@dataclass(frozen=True)
class _Answer:
    """Oracle rows: truth in float64 and an honest computation in the case's dtype, [n, Hq, Dv] each."""

    truth: torch.Tensor
    honest: torch.Tensor


def choose_rows(query_lens: Sequence[int], most: int, seed: int = 0) -> list[int]:
    """Row numbers to look at: both ends of the first, the last and some other requests, and others at random; at most `most`."""
    starts = [0, *accumulate(query_lens)]
    living = [request for request, length in enumerate(query_lens) if length]
    draw = random.Random(seed)
    others = draw.sample(living, min(len(living), most // 4))
    rows: dict[int, None] = {}
    for request in [*living[:1], *living[-1:], *others]:
        rows.setdefault(starts[request])
        rows.setdefault(starts[request + 1] - 1)
    for row in draw.sample(range(starts[-1]), min(starts[-1], most)):
        rows.setdefault(row)
    return list(rows)[:most]


def contested_rows(one: torch.Tensor, other: torch.Tensor, most: int) -> list[int]:
    """Rows [T] where two outputs [T, Hq, Dv] are furthest apart."""
    step = 1024  # rows at a time: a long prefill's difference in float32 would take gigabytes
    parts = [slice(start, start + step) for start in range(0, len(one), step)]
    apart = torch.cat(
        [(one[part].float() - other[part].float()).abs().amax(dim=(1, 2)) for part in parts]
    )
    return [int(row) for row in apart.topk(min(most, len(apart))).indices]


class Gate:
    """The judge of one case.

    Args:
        material: the tensors that will be timed.
        most_rows: rows to compare with the oracle.
    """

    def __init__(self, material: Material, most_rows: int = 64) -> None:
        self._material = material
        self._rows = choose_rows(material.case.batch.query_lens, most_rows)
        self._answers: dict[tuple[int, ...], _Answer] = {}

    def judge(self, output: torch.Tensor, rows: Sequence[int] | None = None) -> Comparison:
        """Hold an output [T, Hq, Dv] against the oracle at `rows`, or at the gate's own."""
        broken = ~torch.isfinite(output).all(dim=2).all(dim=1)
        if bool(broken.any()):
            row = int(broken.int().argmax())
            return Comparison(
                "out",
                False,
                note=f"{int(broken.sum())} rows hold NaN or infinity, or were never written, the first is {row}",
            )
        chosen = tuple(self._rows if rows is None else rows)
        if chosen not in self._answers:
            self._answers[chosen] = self._answer(chosen)
        answer = self._answers[chosen]
        index = torch.tensor(chosen, device=output.device)
        return compare(output[index], answer.truth, answer.honest, self._material.spec.dtype)

    def judge_write(self, impl: AttentionImpl) -> Comparison:
        """Whether the backend writes this step's keys and values where they belong; the cache holds the right ones afterwards."""
        material, cache = self._material, self._material.caches[0]
        views = (cache.key_cache, cache.value_cache)
        slots = material.slots.tolist()
        before = [read_slots(view, slots).to(torch.float64) for view in views]
        for view, tokens in zip(views, before, strict=True):
            write_slots(view, slots, torch.zeros_like(tokens), 1.0)
        impl.write_kv(material.key, material.value, cache, material.slots)
        after = [read_slots(view, slots).to(torch.float64) for view in views]
        for view, tokens in zip(views, before, strict=True):
            write_slots(view, slots, tokens, 1.0)
        wrong = [
            name
            for name, a, b in zip(("keys", "values"), before, after, strict=True)
            if not torch.equal(a, b)
        ]
        return Comparison(
            "cache write",
            not wrong,
            note=f"{' and '.join(wrong)} are not in their slots" if wrong else "",
        )

    def _answer(self, rows: Sequence[int]) -> _Answer:
        truth: list[torch.Tensor] = []
        honest: list[torch.Tensor] = []
        for row in rows:
            query, key, value = self._row(row)
            one = torch.tensor([0, 1])
            keys = torch.tensor([0, len(key)])
            for kept, precision in ((truth, torch.float64), (honest, self._material.spec.dtype)):
                kept.append(
                    unpaged_attention(
                        query, key, value, one, keys, self._material.terms, precision
                    ).out
                )
        return _Answer(torch.cat(truth), torch.cat(honest))

    def _row(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One query [1, Hq, D] and the keys and values up to its own position."""
        material = self._material
        batch, block_size = material.case.batch, material.case.block_size
        ends = list(accumulate(batch.query_lens))
        request = next(index for index, end in enumerate(ends) if row < end)
        length = batch.seq_lens[request] - (ends[request] - 1 - row)
        assert material.common.block_table_tensor is not None  # every case is paged
        blocks = material.common.block_table_tensor[request, : -(-length // block_size)].long()
        cache = material.caches[0]
        key, value = (
            _tokens(view, blocks, length) for view in (cache.key_cache, cache.value_cache)
        )
        return material.query[row : row + 1], key, value


def _tokens(view: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """[length, Hkv, D] out of [B, N, Hkv, D], by one gather."""
    raw = view.view(torch.uint8) if view.element_size() == 1 else view
    return raw.index_select(0, blocks).reshape(-1, *raw.shape[2:])[:length].view(view.dtype)
