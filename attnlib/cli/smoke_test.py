"""One tiny batch through a backend, compared with the formula itself: does it run on this chip at all? ("no kernel image" shows here, not later.)"""

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
"""Of the relative Frobenius norm: a tiny bfloat16 batch errs by under 0.01; a kernel that does not work errs by 1."""


def smoke_test(backend: type[AttentionBackend], device: DeviceInfo) -> str:
    """ "ran ..." with the error, or what went wrong in one line. Never raises."""
    try:
        spec = _ordinary_spec(backend, device)
        if spec is None:
            return "takes none of the ordinary specs"
        mine, reference = _run(backend, spec, device.torch_device)
        error = float((mine - reference).norm() / reference.norm())
        verdict = "ran" if error < _TOLERANCE else "WRONG"
        return f"{verdict} a batch of {spec.dtype} with heads of {spec.head_size}, off by {error:.1e}".replace(
            "torch.", ""
        )
    except Exception as problem:
        return f"failed: {type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"


def _ordinary_spec(backend: type[AttentionBackend], device: DeviceInfo) -> AttentionSpec | None:
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
    """(what the backend says, what softmax(q k / sqrt(D)) v says) for one token without context and one prompt of eight."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(9, heads, 64, generator=generator).to(device, spec.dtype) for heads in (4, 2, 2)
    )
    cache = PagedKVCache.allocate(spec, 4, device)
    common = CommonAttentionMetadata.from_lengths(
        [1, 8], [1, 8], [[2], [1]], spec.block_size, device
    )
    step = backend.make_builder(spec, device).build(0, common)
    out: torch.Tensor = Attention(spec, backend=backend, device=device)(q, k, v, cache, step)
    wide_k, wide_v = (x.float().repeat_interleave(2, dim=1) for x in (k, v))
    visible = torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    visible[1:, 0] = False
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_k) / 8.0
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return out.float().cpu(), torch.einsum("hqk,khd->qhd", weights, wide_v).cpu()
