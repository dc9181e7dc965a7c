"""What the GPU tests share: who can run here and why not, and steps on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.backends.base import AttentionBackend
from attnlib.device import resolve_device
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.selection import load_backend
from attnlib.spec import AttentionSpec

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FOREIGN = ("flash_attn", "flashinfer")
ON_GPU = ("triton", *FOREIGN)


def backend_or_skip(name: str, spec: AttentionSpec) -> type[AttentionBackend]:
    """The backend, or a skip with every reason why it cannot run this spec here."""
    backend, device = load_backend(name), resolve_device("cuda")
    reasons = backend.unavailable(device) + backend.validate_configuration(spec, device)
    if reasons:
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    return backend


def spec_of(**changes: Any) -> AttentionSpec:
    """A Llama-like layer in bfloat16."""
    fields: dict[str, Any] = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 128,
        "dtype": torch.bfloat16,
        "block_size": 16,
    }
    return AttentionSpec(**{**fields, **changes})


def batch_of(
    spec: AttentionSpec, query_lens: list[int], seq_lens: list[int], num_blocks: int, seed: int
) -> CommonAttentionMetadata:
    """A batch with blocks of its own, drawn from the whole pool."""
    draw = torch.Generator().manual_seed(seed)
    widest = max([-(-length // spec.block_size) for length in seq_lens], default=1)
    table = (
        torch.randperm(num_blocks, generator=draw)[: len(seq_lens) * widest]
        .view(len(seq_lens), widest)
        .to(torch.int32)
    )
    return CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table, spec.block_size, "cuda"
    )
