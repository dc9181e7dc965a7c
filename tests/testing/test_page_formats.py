"""The integer reference of formats with scales in the page (M16), by hand-computed numbers."""

from __future__ import annotations

import pytest
import torch

from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.testing.layouts import Dimensions, allocate_views, read_slots, write_slots
from attnlib.testing.page_formats import PAGE_NAMES, dequantize_tokens, quantize_tokens


def test_names_are_those_of_the_library() -> None:
    assert set(PAGE_NAMES) == set(PAGE_FORMATS)


def test_int8_by_hand() -> None:
    """m = 127 / 2 gives s = 0.5: halves are exact, quarters are ties, which go to even."""
    x = torch.tensor([[[63.5, -63.5, 0.25, 0.75, 1.25, -0.25, 0.0, 10.0]]])
    elements, scales = quantize_tokens(x, "int8_per_token_head")
    assert scales.tolist() == [[[0.5]]]
    assert elements.tolist() == [[[127, -127, 0, 2, 2, 0, 0, 20]]]
    assert dequantize_tokens(elements, scales)[0, 0, -1] == 10.0


def test_fp8_by_hand() -> None:
    """m = 448 gives s = 1: 17 and 19 lie between 16, 18 and 20; 2^-10 is a tie of 0 and 2^-9."""
    x = torch.tensor([[[448.0, -448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -0.0, 1.0]]])
    elements, scales = quantize_tokens(x, "fp8_per_token_head")
    assert scales.item() == 1.0
    expected = [448.0, -448.0, 16.0, 20.0, 0.0, 2.0**-8, -0.0, 1.0]
    assert elements.float().flatten().tolist() == expected
    assert torch.equal(
        dequantize_tokens(elements, scales).flatten(), torch.tensor(expected).double()
    )


def test_int4_by_hand() -> None:
    """Quarters [0:2], [2:4], [4:6], [6:8] of a head of 8; a word holds one element of each."""
    x = torch.tensor([[[7.0, -7.0, 3.5, 0.25, 0.0, 0.0, 70000.0 * 7, 1.0]]])
    elements, scales = quantize_tokens(x, "int4_per_group")
    assert scales.flatten().tolist() == [1.0, 0.5, 0.0, 65504.0]
    # words: (7 + 8) | (7 + 8) << 4 | 8 << 8 | (7 + 8) << 12, then (-7 + 8) | (0 + 8) << 4 | ...
    assert elements.flatten().tolist() == [0xFF, 0xF8, 0x81, 0x88]
    back = dequantize_tokens(elements, scales).flatten().tolist()
    assert back == [7.0, -7.0, 3.5, 0.0, 0.0, 0.0, 7 * 65504.0, 0.0]


def test_nvfp4_by_hand() -> None:
    """m = 12 gives s = 2: ties of 4-bit floats go to even bits; 6.2 / 6 rounds to e4m3 1.0."""
    x = torch.zeros(1, 1, 32)
    x[0, 0, :8] = torch.tensor([12.0, -12.0, 10.0, 7.0, 0.5, 1.5, 2.5, -3.5])
    x[0, 0, 16:18] = torch.tensor([6.2, 5.5])
    elements, scales = quantize_tokens(x, "nvfp4")
    assert scales.view(torch.float8_e4m3fn).float().tolist() == [[[2.0, 1.0]]]
    back = dequantize_tokens(elements, scales).flatten()
    assert back[:8].tolist() == [12.0, -12.0, 8.0, 8.0, 0.0, 2.0, 2.0, -4.0]
    assert back[16:18].tolist() == [6.0, 6.0] and elements.flatten()[0] == 0xF7


def test_mxfp4_by_hand() -> None:
    """m = 12 is 1.5 * 2^3: s = 2^(3 - 2); 15.9 saturates at 6 * 2."""
    x = torch.zeros(1, 1, 64)
    x[0, 0, :4] = torch.tensor([15.9, -1.0, 3.0, 0.4])
    elements, scales = quantize_tokens(x, "mxfp4")
    assert scales.tolist() == [[[128, 1]]]
    back = dequantize_tokens(elements, scales).flatten()
    assert back[:4].tolist() == [12.0, -1.0, 3.0, 0.0] and not back[32:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-7, 1e-30, 1e30])
@pytest.mark.parametrize("name", PAGE_NAMES)
def test_torch_stores_the_same_bits(name: str, size: float, dtype: torch.dtype) -> None:
    """M16: also ties, zeros, infinities, NaN, numbers near the limits of scales."""
    torch.manual_seed(0)
    x = (torch.randn(24, 3, 64) * size).to(dtype)
    x[3], x[6, :, ::2] = 0.0, -0.0
    x[4, 0, 5], x[5, 1, 7] = float("nan"), float("inf")
    x[7] = torch.randint(-127, 128, (3, 64)) / 2
    x[8] = torch.finfo(dtype).max
    elements, scales = PAGE_FORMATS[name].store(x)
    wanted, wanted_scales = quantize_tokens(x, name)
    assert torch.equal(elements.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales.float().nan_to_num(-1.0), wanted_scales.float().nan_to_num(-1.0))
    real = PAGE_FORMATS[name].load(elements, scales)
    torch.testing.assert_close(
        real.double(), dequantize_tokens(wanted, wanted_scales), rtol=1e-6, atol=0, equal_nan=True
    )
    assert real[4, 0].isnan().any() and not real[4, 1:].isnan().any()
    assert real[5].isfinite().all() and real[8].isfinite().all(), "writes saturate"
    if size == 1.0:
        steps = {"int8_per_token_head": 127, "fp8_per_token_head": 16, "int4_per_group": 7}
        step = steps.get(name, 3)
        usual = x[9:].float()
        assert ((real[9:] - usual).abs() <= usual.abs().amax(-1, keepdim=True) / step).all()


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_slots_of_pages(name: str) -> None:
    """P4: a token is stored in its slot, elements and scales; other slots keep their poison."""
    dims = Dimensions(head_size=32, head_size_v=32, page_formats=(name, name))
    cache = allocate_views(dims, 3, "HND_INTERLEAVED", fill="nan")
    assert cache.scales is not None
    tokens = torch.randn(2, 2, 32)
    write_slots(cache.key, [40, 3], tokens, cache.scales[0])
    elements, scales = quantize_tokens(tokens, name)
    assert torch.equal(read_slots(cache.key, [40, 3]).float(), elements.float())
    assert torch.equal(cache.scales[0][2, 8], scales[0])
    poisoned = cache.scales[0].isnan() | (cache.scales[0] == 255)
    assert int(poisoned.any(-1).any(-1).sum()) == 3 * 16 - 2
    assert bool((cache.scales[1].isnan() | (cache.scales[1] == 255)).all())
