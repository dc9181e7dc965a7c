"""Decodes whose keys are read in place, and plans that the layers of a batch share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch import decode_plan
from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.torch.paged_prefill import paged_prefill

SIZE, KV_HEADS, HEAD_SIZE = 64, 4, 64  # 64 KiB of keys in a block


class Batch:
    """A batch over 12 blocks: lengths, and block table."""

    def __init__(
        self, lengths: list[int], table: list[list[int]], query_lens: list[int] | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.query_lens = query_lens or [1] * len(lengths)
        self.starts = torch.tensor([0, *self.query_lens]).cumsum(0, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.table = torch.tensor(table, dtype=torch.int32)
        self.query = torch.randn(sum(self.query_lens), 8, HEAD_SIZE, generator=generator)
        shape = (12, SIZE, KV_HEADS, HEAD_SIZE)
        self.key, self.value = (torch.randn(shape, generator=generator) for _ in range(2))

    def run(self, operation: Any, params: AttentionParams, **arguments: Any) -> Any:
        out, lse = torch.empty_like(self.query), torch.empty(self.query.shape[:2])
        operation(
            self.query,
            self.key,
            self.value,
            self.table,
            self.starts,
            self.lengths,
            params,
            max_query_len=max(self.query_lens),
            max_seq_len=int(self.lengths.max()),
            out=out,
            lse=lse,
            **arguments,
        )
        return out, lse

    def check(self, params: AttentionParams, **arguments: Any) -> None:
        found = self.run(paged_decode, params, **arguments)
        expected = self.run(paged_prefill, params, batch_invariant=True)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.allclose(ours, theirs, atol=2e-6, rtol=1e-5, equal_nan=True)


TABLE = [[3, 4, 5, 0], [7, 2, 0, 0], [9, 1, 11, 6], [8, 0, 0, 0]]
PARAMS = {
    "causal": AttentionParams(scale=0.1),
    "window": AttentionParams(scale=0.1, window=(70, 0)),
    "chunk": AttentionParams(scale=0.1, attention_chunk_size=100),
    "sinks": AttentionParams(scale=0.1, sinks=torch.linspace(-1, 3, 8)),
    "scales": AttentionParams(scale=0.1, k_scale=0.5, v_scale=torch.linspace(1, 2, KV_HEADS)),
    "a scale of NaN": AttentionParams(scale=0.1, k_scale=torch.tensor([torch.nan])),
    "slopes": AttentionParams(scale=0.1, alibi_slopes=torch.linspace(0.1, 0.5, 8)),
}


@pytest.mark.parametrize(
    "lengths", [[192, 128, 250, 1], [65, 66, 193, 64], [190, 0, 3, 5]], ids=str
)
@pytest.mark.parametrize("name", PARAMS)
def test_values(name: str, lengths: list[int]) -> None:
    batch = Batch(lengths, TABLE)
    batch.check(PARAMS[name])
    batch.key[10] = torch.nan  # a block of no request, and slots behind the lengths (P5)
    for row, length in enumerate(lengths):
        if length % SIZE:
            batch.key[TABLE[row][length // SIZE], length % SIZE :] = torch.nan
            batch.value[TABLE[row][length // SIZE], length % SIZE :] = torch.nan
    batch.check(PARAMS[name])


def test_interleaved_blocks_and_short_queries() -> None:
    """Blocks of keys and values alternate in memory; some requests have several tokens."""
    batch = Batch([192, 128, 250, 9], TABLE, [1, 3, 1, 2])
    both = torch.stack([batch.key, batch.value], 1).flatten(0, 1)
    batch.key, batch.value = both[::2], both[1::2]
    batch.check(PARAMS["causal"])


def test_runs_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs, and runs of half precision, are gathered."""
    kinds = []
    make = decode_plan._make

    def counted(*args: Any) -> Any:
        plan = make(*args)
        kinds.append((len(plan.runs.requests) if plan.runs else 0, len(plan.groups)))
        return plan

    monkeypatch.setattr(decode_plan, "_make", counted)
    batch = Batch([192, 128, 256, 1], TABLE)
    batch.run(paged_decode, PARAMS["causal"])
    assert kinds.pop() == (4, 0)
    batch.query, batch.key, batch.value = (
        x.bfloat16() for x in (batch.query, batch.key, batch.value)
    )
    batch.run(paged_decode, PARAMS["causal"])
    runs, groups = kinds.pop()
    assert runs == 2 and groups >= 1
    batch = Batch([12, 12], [[5, 3], [1, 2]])
    batch.key, batch.value = (x[:, :8] for x in (batch.key, batch.value))
    batch.run(paged_decode, PARAMS["causal"])
    runs, groups = kinds.pop()
    assert (runs, groups) == (0, 1)  # blocks that are consecutive, but not in memory
    batch.check(PARAMS["causal"])


def test_layers_share_a_plan_while_its_values_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = decode_plan._make

    def counted(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    monkeypatch.setattr(decode_plan, "_make", counted)
    batch, plans, params = Batch([192, 128, 250, 1], TABLE), {}, PARAMS["causal"]
    for layer in range(3):
        batch.key, batch.value = (x.roll(layer, 0) for x in (batch.key, batch.value))
        batch.check(params, plans=plans)
    assert len(made) == 1
    batch.check(replace(params, sinks=PARAMS["sinks"].sinks), plans=plans)
    assert len(made) == 1  # no plan depends on sinks
    for changed in (batch.table, batch.lengths):
        changed[0] -= 1
        made.clear()
        batch.check(params, plans=plans)
        batch.check(params, plans=plans)
        assert len(made) == 1
    made.clear()
    batch.check(PARAMS["window"], plans=plans)
    batch.check(PARAMS["slopes"], plans=plans)
    assert len(made) == 2
