"""Backends whose calls a CUDA graph records, as transformers compiles decodes."""

from __future__ import annotations

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.errors import UnsupportedConfigError
from attnlib.selection import get_attn_backend
from attnlib.selection.current import current_request
from attnlib.spec import AttentionSpec, CudaGraphSupport

__all__ = ["graphs_record", "recorded_backend"]


def graphs_record(backend: type[AttentionBackend]) -> bool:
    """Whether a CUDA graph can record each batch of a backend."""
    builder = backend.get_builder_cls()
    always = builder.cudagraph_support is CudaGraphSupport.ALWAYS
    return always and not builder.needs_host_lengths


def recorded_backend(
    spec: AttentionSpec, device: torch.device, backend: type[AttentionBackend]
) -> type[AttentionBackend]:
    """The first backend of auto that a CUDA graph can record; `backend` where there is none, or the
    user requires it."""
    request, _ = current_request(None)
    found, excluded = backend, set(request.excluded)
    while request.is_auto and not graphs_record(found):
        excluded.add(found.get_name())
        others = ",".join(["auto", *(f"-{name}" for name in sorted(excluded))])
        try:
            found = get_attn_backend(spec, others, device)
        except UnsupportedConfigError:
            return backend
    return found
