"""Helpers of the GPU tests: backends that are available, specs and batches."""

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
    """The backend, or a skip with all reasons why it does not support the spec on this device."""
    backend, device = load_backend(name), resolve_device("cuda")
    reasons = backend.unavailable(device) + backend.validate_configuration(spec, device)
    if reasons:
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    return backend


def spec_of(**changes: Any) -> AttentionSpec:
    """The spec of a Llama layer in bfloat16."""
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
    """A batch with random distinct blocks of the pool."""
    draw = torch.Generator().manual_seed(seed)
    columns = max([-(-length // spec.block_size) for length in seq_lens], default=1)
    table = (
        torch.randperm(num_blocks, generator=draw)[: len(seq_lens) * columns]
        .view(len(seq_lens), columns)
        .to(torch.int32)
    )
    return CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table, spec.block_size, "cuda"
    )
