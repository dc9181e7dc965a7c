"""The correctness check finds wrong outputs wherever the error is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.bench.case_text import parse_case
from attnlib.bench.correctness import CorrectnessCheck, contested_rows, sample_rows
from attnlib.bench.inputs import cold_copies, make_inputs
from attnlib.bench.suites import known_cases
from attnlib.layer import Attention
from attnlib.ops.torch.hadamard import rotate_heads
from attnlib.testing.layouts import read_slots
from attnlib.testing.oracle import paged_attention
from attnlib.testing.page_formats import PAGE_NAMES

CPU = torch.device("cpu")
CASES = (
    "3q1s40_q9s30@heads=4/2,d=16,dtype=float32",
    "2q1s70_q20s50@heads=4/2,d=16,dtype=float32,window=13,sinks,cap=5,page=8",
    "2q4s40@heads=4/1,d=16,dv=8,dtype=bfloat16",
    "q1s40_q11@heads=2/2,d=16,dtype=float32,kv=fp8_e4m3",
)


@pytest.mark.parametrize("text", CASES)
def test_each_row_is_compared_with_the_row_of_the_whole_batch(text: str) -> None:
    """One query over the keys up to its position equals the row of the whole batch (M1, M2, M4)."""
    inputs = make_inputs(parse_case(text), CPU)
    cache, common = inputs.caches[0], inputs.common
    assert common.block_table_tensor is not None
    whole = paged_attention(
        inputs.query,
        cache.key_cache,
        cache.value_cache,
        common.block_table_tensor,
        common.query_start_loc,
        common.seq_lens,
        inputs.params,
    ).out
    check = CorrectnessCheck(inputs)
    rows = range(len(whole))
    right = check.output(whole.to(inputs.spec.dtype), rows)
    assert right.passed, right
    for row in rows:
        wrong = whole.clone()
        wrong[row] += 0.2
        assert not check.output(wrong.to(inputs.spec.dtype), rows).passed, row


def test_rows_are_compared_over_the_selected_keys() -> None:
    """M11: right with the lists of the case, wrong over all keys."""
    text = "3q1s40_q9s30@heads=4/2,d=16,dtype=float32,select=kv_head:4:3"
    case = parse_case(text)
    inputs = make_inputs(case, CPU)
    found = {}
    for spec in (case.spec, case.spec.replace(key_selection=None)):
        layer = Attention(spec, backend="torch", device="cpu")
        metadata = layer.backend.make_builder(spec, "cpu").build(0, inputs.common)
        selected = inputs.selected_keys[0] if spec.key_selection else None
        call = (inputs.query, None, None, inputs.caches[0], metadata)
        found[spec.key_selection] = layer(*call, selected_keys=selected)
    check = CorrectnessCheck(inputs)
    assert check.output(found[case.key_selection]).passed
    assert not check.output(found[None]).passed


def test_unwritten_rows_are_found_outside_the_sample() -> None:
    inputs = make_inputs(parse_case("q300@heads=2/1,d=16,dtype=float32"), CPU)
    output = torch.zeros_like(inputs.output)
    output[217, 1, 3] = float("nan")
    found = CorrectnessCheck(inputs, max_rows=4).output(output)
    assert not found.passed and "the first is 217" in str(found)


def test_samples_contain_the_ends_of_requests() -> None:
    for query_lens in ([2048], [1] * 256, [1] * 60 + [2048], [4] * 16, [0, 3, 0]):
        rows, total = sample_rows(query_lens, 64), sum(query_lens)
        assert len(rows) == len(set(rows)) == min(64, total) and {0, total - 1} <= set(rows)
        assert all(0 <= row < total for row in rows)
    assert sample_rows([2048], 64) == sample_rows([2048], 64)
    mixed = set(sample_rows([1] * 60 + [2048], 64))
    assert 60 in mixed and mixed & set(range(1, 60))


def test_contested_rows_are_where_outputs_differ_most() -> None:
    one = torch.randn(3000, 2, 4)
    other = one.clone()
    other[2500, 1, 2] += 5
    other[7, 0, 0] -= 9
    assert contested_rows(one, other, 2) == [7, 2500]


def test_the_cache_already_holds_the_keys_of_the_step() -> None:
    """Writing them at any time changes nothing (P7)."""
    inputs = make_inputs(parse_case("2q3s20@heads=2/1,d=16,kv=fp8_e4m3"), CPU)
    stored = read_slots(inputs.caches[0].key_cache, inputs.slots.tolist())
    assert torch.equal(stored.to(inputs.key.dtype), inputs.key) and bool(inputs.key.any())


def test_blocks_are_in_random_order() -> None:
    inputs = make_inputs(parse_case("2q1s400@heads=2/1,d=16"), CPU)
    table = inputs.common.block_table_tensor
    assert table is not None
    used = table[:, :25].flatten().tolist()
    assert (
        len(set(used)) == 50 and sum(b == a + 1 for a, b in zip(used, used[1:], strict=False)) < 10
    )


def test_decodes_use_copies_that_exceed_the_l2_cache() -> None:
    """Four times the L2 cache if memory allows; a prefill uses one copy."""
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


def test_float8_queries_have_a_bound_of_their_own() -> None:
    """Rounded queries pass where the case permits them, and wrong outputs do not."""
    text = "2q3s40_q9s30@heads=4/2,d=32,dtype=float32,kv=fp8_e4m3"
    outcomes = []
    for case in (text, f"{text},fp8q=1"):
        inputs = make_inputs(parse_case(case), CPU)
        assert inputs.spec.allow_fp8_queries == case.endswith("fp8q=1")
        layer = Attention(inputs.spec, backend="torch", device="cpu")
        metadata = layer.backend.make_builder(inputs.spec, "cpu").build(0, inputs.common)
        largest = inputs.query.abs().amax(-1, keepdim=True)
        scale = largest / 448
        rounded = (inputs.query / scale).to(torch.float8_e4m3fn).float() * scale
        check, cache = CorrectnessCheck(inputs), inputs.caches[0]
        exact = layer(inputs.query, None, None, cache, metadata)
        outcomes.append(
            (
                check.output(exact).passed,
                check.output(layer(rounded, None, None, cache, metadata)).passed,
                check.output(1.1 * exact).passed,
            )
        )
    assert outcomes == [(True, False, False), (True, True, False)]


def test_rotated_heads_are_compared_with_plain_ones() -> None:
    """P15: keys and values of a step are stored rotated, and outputs are rotated back."""
    inputs = make_inputs(
        parse_case("2q3s40_q9s30@heads=4/2,d=32,dtype=float32,rotation=hadamard"), CPU
    )
    layer = Attention(inputs.spec, backend="torch", device="cpu")
    metadata = layer.backend.make_builder(inputs.spec, "cpu").build(0, inputs.common)
    output = layer(inputs.query, None, None, inputs.caches[0], metadata)
    check = CorrectnessCheck(inputs)
    assert check.output(output).passed and check.cache_write(layer.impl).passed
    assert not check.output(rotate_heads(output, 0)).passed


@pytest.mark.parametrize(
    "name", [*PAGE_NAMES, "int8_per_token_head,v=int4_per_group,rotation=hadamard"]
)
def test_pages_are_checked_bit_by_bit(name: str) -> None:
    """M16, P15: the reference passes over the real values; an element or a scale that differs is
    found, and the cache is as before."""
    inputs = make_inputs(parse_case(f"2q3s40_q9s30@heads=4/2,d=32,dtype=float32,kv={name}"), CPU)
    cache, check = inputs.caches[0], CorrectnessCheck(inputs)
    layer = Attention(inputs.spec, backend="torch", device="cpu")
    metadata = layer.backend.make_builder(inputs.spec, "cpu").build(0, inputs.common)
    assert check.output(layer(inputs.query, None, None, cache, metadata)).passed
    assert cache.pages is not None
    before = cache.pages.clone()
    assert check.cache_write(layer.impl).passed
    assert torch.equal(cache.pages, before)
    for view, word in zip(cache.block_views, ("keys", "values", "scales of k", "scales of v"),
                          strict=True):  # fmt: skip
        slot = int(inputs.slots[0])

        class Wrong:
            def write_kv(
                self, *arguments: Any, view: torch.Tensor = view, slot: int = slot
            ) -> None:
                layer.impl.write_kv(*arguments)
                stored = view.view(torch.uint8) if view.element_size() == 1 else view
                stored[slot // 16, slot % 16, 0, 0] += 1

        found = check.cache_write(Wrong())  # type: ignore[arg-type]  # only writes
        assert not found.passed and word in str(found), str(found)
        assert torch.equal(cache.pages, before)
