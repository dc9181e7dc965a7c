"""Inputs: equal numbers for every layout and poison; strided tensors; poison in unused memory."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.testing.batch_spec import BatchSpec, parse_batch
from attnlib.testing.block_placement import PLACEMENTS, PlacementKind, place_blocks
from attnlib.testing.inputs import make_inputs, make_oracle_params
from attnlib.testing.layouts import (
    CACHE_LAYOUTS,
    Dimensions,
    read_slots,
    write_slots,
)

DIMS = Dimensions(head_size=16, head_size_v=8)
BATCH = parse_batch("q3s20_q1s17_q2s0_q0s0_pad2")


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_layout_placement_and_poison_do_not_change_the_result(
    kind: PlacementKind, layout: str
) -> None:
    """P2, P3, P5: memory that must not be read does not affect the oracle."""
    batch = parse_batch("q3s40_q1s33_q5s64_pad1")
    params = make_oracle_params(DIMS, batch, {})
    reference = make_inputs(batch, DIMS, place_blocks(batch, 16, kind)).oracle(params)
    poisoned = make_inputs(
        batch, DIMS, place_blocks(batch, 16, kind), layout=layout, poison="nan"
    ).oracle(params)
    assert torch.equal(reference.out, poisoned.out)
    assert torch.isfinite(poisoned.out).all()


def test_tensors_are_strided_views_unless_contiguous_is_set() -> None:
    """P9: q, k, v are views of one fused tensor, out is strided."""
    inputs = make_inputs(BATCH, DIMS, place_blocks(BATCH, 16))
    assert inputs.query.untyped_storage().data_ptr() == inputs.value.untyped_storage().data_ptr()
    for tensor in (inputs.query, inputs.key, inputs.value, inputs.out):
        assert not tensor.is_contiguous()
        assert tensor.stride(-1) == 1
    packed = make_inputs(BATCH, DIMS, place_blocks(BATCH, 16), contiguous=True)
    assert packed.query.is_contiguous()
    assert torch.equal(packed.query, inputs.query)


def test_poison_fills_all_unused_memory() -> None:
    """P5: block tails, unused blocks, padding rows and out hold poison; the sequences do not."""
    inputs = make_inputs(BATCH, DIMS, place_blocks(BATCH, 16), poison="nan")
    used = [
        slot for r, s in enumerate(BATCH.seq_lens) for slot in inputs.placement.slots(r, 0, s, 16)
    ]
    unused = sorted(set(range(inputs.placement.num_blocks * 16)) - set(used))
    for view in (inputs.cache.key, inputs.cache.value):
        assert torch.isfinite(read_slots(view, used)).all()
        assert torch.isnan(read_slots(view, unused)).all()
    assert torch.isnan(inputs.out).all()
    assert torch.isnan(inputs.query[-2:]).all()
    assert torch.isfinite(inputs.query[:-2]).all()


def test_slots_of_new_tokens_hold_poison_until_they_are_written() -> None:
    """P7: the oracle raises an error for a cache without this step's keys."""
    before = make_inputs(BATCH, DIMS, place_blocks(BATCH, 16), poison="nan", kv_written=False)
    after = make_inputs(BATCH, DIMS, place_blocks(BATCH, 16), poison="nan")
    slots = before.written_slots()
    assert len(slots) == 4
    assert torch.isnan(read_slots(before.cache.key, slots)).all()
    write_slots(before.cache.key, slots, before.key[before.slot_mapping >= 0], 1.0)
    torch.testing.assert_close(before.cache.key, after.cache.key, equal_nan=True, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="kv_written=True"):
        before.oracle(make_oracle_params(DIMS, BATCH, {}))


def test_slots_of_padding_and_of_negative_positions_are_minus_one() -> None:
    """P4, M7: -1 writes nothing."""
    inputs = make_inputs(BATCH, DIMS, place_blocks(BATCH, 16))
    assert inputs.slot_mapping.dtype == torch.int64
    assert inputs.slot_mapping[4:].tolist() == [-1] * 4
    assert (inputs.slot_mapping[:4] >= 0).all()


def test_the_seed_determines_all_tensors() -> None:
    first, same, other = (
        make_inputs(BATCH, DIMS, place_blocks(BATCH, 16), seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first.query, same.query)
    assert torch.equal(first.cache.key, same.cache.key)
    assert not torch.equal(first.query, other.query)


def test_a_tree_bias_lets_each_token_see_itself() -> None:
    batch = BatchSpec((4, 2), (9, 2))
    bias = make_oracle_params(DIMS, batch, {"query_bias": True}).query_bias
    assert bias is not None
    assert all(
        math.isfinite(float(bias[row, column])) for row, column in enumerate((0, 1, 2, 3, 0, 1))
    )
    assert (bias == -math.inf).any()
