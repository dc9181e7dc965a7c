"""The functions of `attnlib.ops` on a GPU: by Triton, as on the CPU, without a host sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnlib.ops import (
    context_attention_fwd,
    flash_attention_prefill,
    paged_attention_decode,
    store_kvcache,
)
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 128, 16


def _prefill(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    return flash_attention_prefill(q, k, v, ends, 0.1, HEADS, KV_HEADS, SIZE)


def _context(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    out = torch.full_like(q, 3.0)
    lens = ends[1:] - ends[:-1] - 5  # 5 rows of gap behind each sequence
    context_attention_fwd(q, k, v, out, ends[:-1], lens, 300, False, None, 40, 7)
    return out


def _decode(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    cache = torch.zeros(2, 64, BLOCK, KV_HEADS, SIZE, dtype=q.dtype, device=q.device)
    slots = torch.arange(k.shape[0], device=q.device)
    store_kvcache(k, v, cache[0], cache[1], slots, BLOCK)
    table = torch.arange(30, device=q.device).view(3, 10)
    lens = torch.tensor([160, 31, 1], device=q.device)
    return paged_attention_decode(
        q[:3], cache[0], cache[1], table, lens, 0.1, HEADS, KV_HEADS, SIZE, BLOCK
    )


@pytest.mark.parametrize("function", [_prefill, _context, _decode])
def test_a_gpu_computes_what_the_cpu_does(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(500, heads, SIZE).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    ends = torch.tensor([0, 200, 230, 500])
    wanted = function(*tensors, ends)
    on_gpu = [tensor.cuda() for tensor in (*tensors, ends)]
    function(*on_gpu)  # compiles
    torch.cuda.synchronize()
    if function is not _decode:  # it creates tensors from Python lists
        torch.cuda.set_sync_debug_mode("error")
    try:
        out = function(*on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.cpu().float(), wanted.float(), atol=2e-2, rtol=2e-2)
