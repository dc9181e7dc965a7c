"""Random compressed entries of a benchmark, and what a query sees of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnlib.bench.backends import find_backends
from attnlib.bench.case_text import parse_case
from attnlib.bench.correctness import CorrectnessCheck
from attnlib.bench.entries import own_and_entries
from attnlib.bench.inputs import make_inputs
from attnlib.bench.runner import make_runner

CPU = torch.device("cpu")


@pytest.mark.parametrize("most", ["", ":5"])
def test_the_check_finds_missing_entries(most: str) -> None:
    """The torch backend passes; without the last entries of each query it does not."""
    case = parse_case(
        f"2q1s90_q9s41@heads=4/1,d=32,mla=1,window=16,sinks=1,dtype=float32,entries=4:8{most}"
    )
    inputs = make_inputs(case, CPU)
    (given,) = inputs.compressed_keys
    assert given.batch.num_entries.tolist() == [22, 22, 8, 8, 8, 9, 9, 9, 9, 10, 10]
    check, (one,) = CorrectnessCheck(inputs), find_backends(["torch"], CPU)
    make_runner(case, one, inputs).attend(0)
    assert check.output(inputs.output).passed
    fewer = dataclasses.replace(given.batch, num_entries=given.batch.num_entries - 3)
    changed = dataclasses.replace(given, batch=fewer)
    other = dataclasses.replace(inputs, compressed_keys=(changed,))
    make_runner(case, one, other).attend(0)
    assert not check.output(inputs.output).passed


def test_what_a_query_sees() -> None:
    """Its window of own keys, then its entries in their order."""
    case = parse_case("q2s41@heads=4/1,d=32,mla=1,window=16,dtype=float32,entries=4:8:5")
    inputs = make_inputs(case, CPU)
    (given,) = inputs.compressed_keys
    key = torch.randn(40, 1, 32)
    keys, values = own_and_entries(key, key, inputs.spec, given, 0)
    assert torch.equal(keys, values) and torch.equal(keys[:16], key[24:])
    assert given.selected is not None
    listed = sorted(entry for entry in given.selected.indices[0, 0].tolist() if entry >= 0)
    table, cache = given.batch.block_table[0], given.cache.key_cache
    assert torch.equal(keys[16:, 0], torch.stack([cache[table[e // 8], e % 8, 0] for e in listed]))
