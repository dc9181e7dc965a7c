"""The gate: wrong answers get a reason and no time, wherever the error sits."""

from __future__ import annotations

import pytest
import torch

from attnlib.bench.case import parse_case
from attnlib.bench.correctness import Gate, choose_rows, contested_rows
from attnlib.bench.inputs import cold_copies, make_material
from attnlib.bench.suites import known_cases
from attnlib.testing.layouts import read_slots
from attnlib.testing.oracle import paged_attention

CPU = torch.device("cpu")
CASES = (
    "3q1s40_q9s30@heads=4/2,d=16,dtype=float32",
    "2q1s70_q20s50@heads=4/2,d=16,dtype=float32,window=13,sinks,cap=5,page=8",
    "2q4s40@heads=4/1,d=16,dv=8,dtype=bfloat16",
    "q1s40_q11@heads=2/2,d=16,dtype=float32,kv=fp8_e4m3",
)


@pytest.mark.parametrize("text", CASES)
def test_sampled_rows_are_the_oracles_rows(text: str) -> None:
    """A row taken alone, with the keys up to its position, is the row of the whole batch (M1, M2, M4)."""
    material = make_material(parse_case(text), CPU)
    cache, common = material.caches[0], material.common
    assert common.block_table_tensor is not None
    whole = paged_attention(
        material.query,
        cache.key_cache,
        cache.value_cache,
        common.block_table_tensor,
        common.query_start_loc,
        common.seq_lens,
        material.terms,
    ).out
    gate = Gate(material)
    rows = range(len(whole))
    right = gate.judge(whole.to(material.spec.dtype), rows)
    assert right.passed, right
    for row in rows:
        wrong = whole.clone()
        wrong[row] += 0.2
        assert not gate.judge(wrong.to(material.spec.dtype), rows).passed, row


def test_rows_that_nobody_wrote_are_seen_everywhere() -> None:
    material = make_material(parse_case("q300@heads=2/1,d=16,dtype=float32"), CPU)
    output = torch.zeros_like(material.output)
    output[217, 1, 3] = float("nan")
    found = Gate(material, most_rows=4).judge(output)
    assert not found.passed and "the first is 217" in str(found)


def test_chosen_rows_hold_the_ends() -> None:
    for query_lens in ([2048], [1] * 256, [1] * 60 + [2048], [4] * 16, [0, 3, 0]):
        rows, total = choose_rows(query_lens, 64), sum(query_lens)
        assert len(rows) == len(set(rows)) == min(64, total) and {0, total - 1} <= set(rows)
        assert all(0 <= row < total for row in rows)
    assert choose_rows([2048], 64) == choose_rows([2048], 64)
    mixed = set(choose_rows([1] * 60 + [2048], 64))
    assert 60 in mixed and mixed & set(range(1, 60))


def test_contested_rows_are_where_outputs_differ_most() -> None:
    one = torch.randn(3000, 2, 4)
    other = one.clone()
    other[2500, 1, 2] += 5
    other[7, 0, 0] -= 9
    assert contested_rows(one, other, 2) == [7, 2500]


def test_the_steps_own_keys_are_in_the_cache_already() -> None:
    """So that writing them, before, after or between, changes nothing (P7)."""
    material = make_material(parse_case("2q3s20@heads=2/1,d=16,kv=fp8_e4m3"), CPU)
    stored = read_slots(material.caches[0].key_cache, material.slots.tolist())
    assert torch.equal(stored.to(material.key.dtype), material.key) and bool(material.key.any())


def test_blocks_lie_in_random_order() -> None:
    material = make_material(parse_case("2q1s400@heads=2/1,d=16"), CPU)
    table = material.common.block_table_tensor
    assert table is not None
    used = table[:, :25].flatten().tolist()
    assert (
        len(set(used)) == 50 and sum(b == a + 1 for a, b in zip(used, used[1:], strict=False)) < 10
    )


def test_decodes_get_cold_copies() -> None:
    """The copies together are four times the L2 cache, if memory allows; a prefill needs one."""
    cases, mib = known_cases(), 2**20
    small, big = cases["decode-1x1k"], cases["decode-64x8k"]
    assert cold_copies(small, 4 * mib, 50 * mib, 100 * 2**30) == 50
    assert cold_copies(big, 2048 * mib, 50 * mib, 100 * 2**30) == 2
    assert cold_copies(big, 2048 * mib, 50 * mib, 5 * 2**30) == 1
    windowed = cases["decode-32x8k-d64-w128-sinks"]
    assert cold_copies(windowed, 512 * mib, 50 * mib, 100 * 2**30) == 25
    assert cold_copies(windowed, 512 * mib, 50 * mib, 8 * 2**30) == 8
    assert cold_copies(cases["prefill-1x2k-p16"], 8 * mib, 50 * mib, 100 * 2**30) == 1
    assert cold_copies(small, 4 * mib, 0, 0) == 1
