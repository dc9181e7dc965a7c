"""Inputs: the same numbers under every layout and poison, strided as real ones are, unread places ruined."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.testing.batch_spec import BatchSpec, parse_batch
from attnlib.testing.block_placement import PLACEMENTS, PlacementKind, place_blocks
from attnlib.testing.inputs import make_inputs, make_oracle_params
from attnlib.testing.layouts import (
    CACHE_LAYOUTS,
    Dimensions,
    allocate_views,
    poison_value,
    read_slots,
    write_slots,
)

DIMS = Dimensions(head_size=16, head_size_v=8)
BATCH = parse_batch("q3s20_q1s17_q2s0_q0s0_pad2")


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize(
    "cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_layouts_are_two_views_of_one_shape(layout: str, cache_dtype: torch.dtype) -> None:
    """P1, P2: a layout is an order in memory; what is written is read back."""
    dims = Dimensions(head_size=16, head_size_v=8, cache_dtype=cache_dtype)
    cache = allocate_views(dims, 5, layout)
    assert cache.key.shape == (5, 16, 2, 16)
    assert cache.value.shape == (5, 16, 2, 8)
    assert cache.key.stride(-1) == cache.value.stride(-1) == 1
    tokens_k, tokens_v = torch.randn(3, 2, 16), torch.randn(3, 2, 8)
    write_slots(cache.key, [0, 79, 33], tokens_k, 1.0)
    write_slots(cache.value, [0, 79, 33], tokens_v, 1.0)
    assert torch.equal(read_slots(cache.key, [33]).float(), tokens_k[2:].to(cache_dtype).float())
    assert torch.equal(
        read_slots(cache.value, [79, 0]).float(), tokens_v[[1, 0]].to(cache_dtype).float()
    )
    written = sum(int((storage != 0).sum()) for storage in cache.storage)
    assert written <= 3 * 2 * (16 + 8) * cache.key.element_size()


def test_interleaved_views_share_an_allocation_without_overlap() -> None:
    """P1: K and V may alternate in one tensor."""
    cache = allocate_views(DIMS, 4, "NHD_INTERLEAVED")
    assert len(cache.storage) == 1
    cache.key.fill_(1.0)
    assert (cache.value == 0).all()
    cache.value.fill_(2.0)
    assert (cache.key == 1).all()


def test_one_byte_caches_store_value_over_scale_saturated() -> None:
    """M9: writes saturate."""
    dims = Dimensions(cache_dtype=torch.float8_e4m3fn)
    view = allocate_views(dims, 1).key
    write_slots(view, [0], torch.full((1, 2, 32), 1e6), torch.tensor([1.0, 1e6]))
    stored = read_slots(view, [0]).float()
    assert stored[0, 0, 0] == 448.0
    assert stored[0, 1, 0] == 1.0


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_layout_placement_and_poison_do_not_change_the_answer(
    kind: PlacementKind, layout: str
) -> None:
    """P2, P3, P5: what may not be read decides nothing, the oracle included."""
    batch = parse_batch("q3s40_q1s33_q5s64_pad1")
    params = make_oracle_params(DIMS, batch, {})
    reference = make_inputs(batch, DIMS, place_blocks(batch, 16, kind)).oracle(params)
    poisoned = make_inputs(
        batch, DIMS, place_blocks(batch, 16, kind), layout=layout, poison="nan"
    ).oracle(params)
    assert torch.equal(reference.out, poisoned.out)
    assert torch.isfinite(poisoned.out).all()


def test_tensors_are_strided_views_and_strides_can_be_packed() -> None:
    """P9: q, k, v are views of one fused tensor, out is strided."""
    inputs = make_inputs(BATCH, DIMS, place_blocks(BATCH, 16))
    assert inputs.query.untyped_storage().data_ptr() == inputs.value.untyped_storage().data_ptr()
    for tensor in (inputs.query, inputs.key, inputs.value, inputs.out):
        assert not tensor.is_contiguous()
        assert tensor.stride(-1) == 1
    packed = make_inputs(BATCH, DIMS, place_blocks(BATCH, 16), contiguous=True)
    assert packed.query.is_contiguous()
    assert torch.equal(packed.query, inputs.query)


def test_poison_is_everywhere_but_in_the_data() -> None:
    """P5: tails of blocks, blocks of nobody, padding rows and out are poison; the sequences are not."""
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


def test_unwritten_steps_hold_poison_where_the_new_tokens_go() -> None:
    """P7: only writing makes this step's keys visible; the oracle refuses to read such a cache."""
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


def test_seeds_decide_everything() -> None:
    one, same, other = (
        make_inputs(BATCH, DIMS, place_blocks(BATCH, 16), seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(one.query, same.query)
    assert torch.equal(one.cache.key, same.cache.key)
    assert not torch.equal(one.query, other.query)


def test_a_tree_bias_lets_each_token_see_itself() -> None:
    batch = BatchSpec((4, 2), (9, 2))
    bias = make_oracle_params(DIMS, batch, {"query_bias": True}).query_bias
    assert bias is not None
    assert all(
        math.isfinite(float(bias[row, column])) for row, column in enumerate((0, 1, 2, 3, 0, 1))
    )
    assert (bias == -math.inf).any()


def test_unknown_layouts_and_poisons_list_the_known_ones() -> None:
    with pytest.raises(
        ContractError, match="no cache layout is named 'HDN'; the layouts are NHD, "
    ):
        allocate_views(DIMS, 1, "HDN")
    with pytest.raises(ContractError, match="no poison is named 'hemlock'; the kinds are zero, "):
        poison_value(torch.float32, "hemlock")
    assert math.isnan(poison_value(torch.float8_e4m3fn, "inf"))
