"""float8 conversion by integer arithmetic: decoding is exact, encoding rounds and saturates."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attnlib.ops.triton.kernels.quant import (
    KV_E4M3_BYTES,
    KV_E5M2_BYTES,
    KV_NATIVE,
    KV_PLAIN,
    decode_kv,
    encode_fp8,
)
from attnlib.ops.triton.launch.scales import kv_kind

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@triton.jit
def _encode_kernel(source, target, n, E5M2: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + lanes, mask=lanes < n, other=0.0)
    tl.store(target + lanes, encode_fp8(x, E5M2), mask=lanes < n)


@triton.jit
def _decode_kernel(source, target, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    lanes = tl.arange(0, 256)
    tl.store(target + lanes, decode_kv(tl.load(source + lanes), KIND, COMPUTE).to(tl.float32))


def _encode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(x.numel(), dtype=torch.uint8, device=x.device)
    _encode_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), dtype == E5M2, 1024)
    return out.view(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("compute", [tl.float16, tl.float32], ids=["f16", "f32"])
def test_every_byte_decodes_to_its_number(
    device: torch.device, dtype: torch.dtype, compute: tl.dtype
) -> None:
    """M9: on chips without float8, including subnormals, infinities and NaN."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    out = torch.empty(256, device=device)
    _decode_kernel[(1,)](codes, out, KV_E5M2_BYTES if dtype == E5M2 else KV_E4M3_BYTES, compute)
    torch.testing.assert_close(out, codes.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_numbers_encode_to_the_nearest(device: torch.device, dtype: torch.dtype) -> None:
    """M9: as torch converts numbers in the range of the format, including ties and subnormals."""
    representable = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    finite = representable[representable.isfinite()].sort().values.unique()
    ties = (finite[1:] + finite[:-1]) / 2
    neighbors = torch.cat([torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(
        -9, 2, 2000
    )
    x = torch.cat([finite, ties, neighbors, noise, torch.tensor([0.0, -0.0, 1e-30])]).to(device)
    x = x[x.abs() <= finite.max()]
    assert torch.equal(_encode(x, dtype).view(torch.uint8), x.to(dtype).view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)], ids=["e4m3", "e5m2"]
)
def test_large_numbers_saturate(device: torch.device, dtype: torch.dtype, largest: float) -> None:
    """M9: including infinities; NaN stays NaN."""
    x = torch.tensor(
        [largest * 1.001, -largest * 4, float("inf"), float("-inf"), 1e38, float("nan")],
        device=device,
    )
    got = _encode(x, dtype).float()
    assert got[:5].tolist() == [largest, -largest, largest, -largest, largest]
    assert got[5].isnan()


def test_decoding_follows_the_chip() -> None:
    """Q1: integer arithmetic on bytes if the chip has no float8, else its own conversion."""
    assert [kv_kind(E4M3, False), kv_kind(E5M2, False)] == [
        KV_E4M3_BYTES.value,
        KV_E5M2_BYTES.value,
    ]
    assert kv_kind(E4M3, True) == kv_kind(E5M2, True) == KV_NATIVE.value
    assert kv_kind(torch.bfloat16, True) == kv_kind(torch.float32, False) == KV_PLAIN.value
