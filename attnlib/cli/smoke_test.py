"""Run a small batch on a backend and compare it with the attention formula.

This finds kernels that were not built for this GPU ("no kernel image") before a model does.
"""

from __future__ import annotations

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.device import DeviceInfo
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec

__all__ = ["smoke_test"]

_TOLERANCE = 0.03
"""Bound of the relative error in the Frobenius norm. Small bfloat16 batches stay below 0.01; a
broken kernel is at about 1."""


def smoke_test(backend: type[AttentionBackend], device: DeviceInfo) -> str:
    """Run the batch and report the result in one line. Never raises.

    Returns:
        "ran ..." with the error, "WRONG ..." if it exceeds the bound, "failed: ..." with the
        exception, or that the backend supports none of the specs that are tried.
    """
    try:
        spec = _supported_spec(backend, device)
        if spec is None:
            return "supports none of the specs of this check"
        actual, reference = _run(backend, spec, device.torch_device)
        error = float((actual - reference).norm() / reference.norm())
        result = "ran" if error < _TOLERANCE else "WRONG"
        dtype = str(spec.dtype).removeprefix("torch.")
        return f"{result} a {dtype} batch with head size {spec.head_size}, error {error:.1e}"
    except Exception as problem:
        first_line = (str(problem).splitlines() or [""])[0]
        return f"failed: {type(problem).__name__}: {first_line}"


def _supported_spec(backend: type[AttentionBackend], device: DeviceInfo) -> AttentionSpec | None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for block_size in (16, 256, 128):
            spec = AttentionSpec(
                num_heads=4, num_kv_heads=2, head_size=64, dtype=dtype, block_size=block_size
            )
            if not backend.validate_configuration(spec, device):
                return spec
    return None


def _run(
    backend: type[AttentionBackend], spec: AttentionSpec, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(backend output, reference): a request of one token, and one whose second block is before its
    first one in the cache."""
    generator = torch.Generator().manual_seed(0)
    lens = [1, spec.block_size + 7]
    rows = sum(lens)
    q, k, v = (
        torch.randn(rows, heads, 64, generator=generator).to(device, spec.dtype)
        for heads in (4, 2, 2)
    )
    cache = PagedKVCache.allocate(spec, 4, device)
    common = CommonAttentionMetadata.from_lengths(
        lens, lens, [[2], [3, 1]], spec.block_size, device
    )
    step = backend.make_builder(spec, device).build(0, common)
    out: torch.Tensor = Attention(spec, backend=backend, device=device)(q, k, v, cache, step)
    wide_k, wide_v = (x.float().repeat_interleave(2, dim=1) for x in (k, v))
    visible = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    visible[1:, 0] = False
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_k) / 8.0
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return out.float().cpu(), torch.einsum("hqk,khd->qhd", weights, wide_v).cpu()
