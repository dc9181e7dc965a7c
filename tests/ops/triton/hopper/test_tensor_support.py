"""Which pages of 4-bit floats the Hopper decode reads, by the strides of their scales."""

from __future__ import annotations

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.decode_schedule import DecodeSchedule
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.hopper.decode_launches import HopperDecode
from attnlib.ops.triton.hopper.dispatch import select_decode
from attnlib.ops.triton.quantized_pages import page_words

CHIP = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)


def _decode(
    name: str, row: int, max_ctas: int | None = None, first: int = 0
) -> HopperDecode | None:
    """The decode of two requests over pages with `row` numbers from scales to scales, which start
    at the number `first`."""
    stored = PAGE_FORMATS[name]
    assert stored.scale_dtype is not None
    count, query = stored.num_scales(128), torch.empty(2, 8, 128, dtype=torch.bfloat16)
    cache, values = torch.empty(2, 5, 16, 2, 64, dtype=torch.uint8)
    memory = torch.empty(5 * 16 * 2 * row + first, dtype=stored.scale_dtype)
    scales = memory[first:].view(5, 16, 2, row)[..., :count]
    starts = torch.zeros(3, dtype=torch.int32)
    batch = BatchTensors(
        starts, starts[:2], torch.zeros(2, 8, dtype=torch.int32), max_seq_len=99, max_query_len=1
    )
    params = AttentionParams(
        scale=0.1, k_scale=scales, v_scale=scales, k_format=stored, v_format=stored
    )
    call = AttentionCall(query, cache, values, query, None, batch, params, CHIP, ())
    return select_decode(call, DecodeSchedule(1, 1, True, None, True, max_ctas=max_ctas))


@pytest.mark.parametrize(("name", "count"), [("nvfp4", 8), ("mxfp4", 4), ("int4_per_group", 4)])
def test_scales_of_a_head_are_one_number(name: str, count: int) -> None:
    """The portable kernels read the others, or refuse them."""
    for row in (count, 2 * count):
        found = _decode(name, row)
        assert found is not None
        heads = row // count
        assert found.last_strides == (32 * heads, 2 * heads, heads) * 2
    assert _decode(name, count + 1) is None and _decode(name, count + 2) is None
    assert _decode(name, count, first=count) is not None
    assert _decode(name, count, first=1) is None and _decode(name, count, first=2) is None


@pytest.mark.parametrize(("name", "reads"), [("nvfp4", False), ("int4_per_group", True)])
def test_decodes_beside_a_prefill(name: str, reads: bool) -> None:
    """CTAs of one warp, which 4-bit floats need, would run on all multiprocessors."""
    assert (_decode(name, PAGE_FORMATS[name].num_scales(128), 44) is not None) == reads


def test_what_is_loaded_as_one_number_starts_at_a_multiple_of_its_size() -> None:
    """The portable kernels refuse other addresses of scales and of elements."""
    stored = PAGE_FORMATS["int4_per_group"]
    elements = torch.empty(4 * 64 + 1, dtype=torch.uint8)
    scales = torch.empty(4 * 4 + 2, dtype=torch.float16)
    view, starts = elements[:-1].view(1, 2, 2, 64), scales[:-2].view(1, 2, 2, 4)
    assert page_words(view, starts, stored) == (32, 32)
    with pytest.raises(ContractError, match="start at 4 modulo 8"):
        page_words(view, scales[2:].view(1, 2, 2, 4), stored)
    with pytest.raises(ContractError, match="starts at 1 modulo 2"):
        page_words(elements[1:].view(1, 2, 2, 64), starts, stored)
