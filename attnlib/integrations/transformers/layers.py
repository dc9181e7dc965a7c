"""One attnlib `Attention` per attention module of the model, and one metadata builder per spec.

transformers passes its module in every call. The attnlib layer of a module (backend, scale, sinks)
is created in the first call and kept by weak reference, so it is released with the model. Selection
runs in every call (it has a cache), so a changed ATTNLIB_BACKEND or `use_backend` takes effect in
the next call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.integrations.transformers.eager_models import is_causal_module
from attnlib.integrations.transformers.graph_backends import graphs_record, recorded_backend
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec

__all__ = [
    "Call",
    "builder_for",
    "current_stream",
    "is_capturing",
    "is_transient",
    "layer_for",
    "layer_name",
    "tensor_version",
    "transient",
]

logger = logging.getLogger("attnlib")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the attention function, in the shapes of transformers.

    Attributes:
        module: the attention module of the model.
        query: `[B, Hq, T, D]`.
        key: `[B, Hkv, S, D]`; in plain generation the history and the new tokens.
        value: `[B, Hkv, S, Dv]`.
        scale: softmax scale.
        soft_cap: soft cap of the scores, or None.
        sinks: `[Hq]` sink logits, or `[B, Hq, T, 1]` of query tokens, or None.
        sliding_window: W keys are visible, including the query's own; None for all.
        declared_causal: the argument `is_causal`; None for what the module declares.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    soft_cap: float | None
    sinks: torch.Tensor | None
    sliding_window: int | None
    declared_causal: bool | None

    @property
    def causal(self) -> bool:
        """Whether a call without a mask is causal."""
        return (
            is_causal_module(self.module) if self.declared_causal is None else self.declared_causal
        )

    @property
    def layer_idx(self) -> int:
        """Index of the layer in the paged cache of transformers."""
        return int(cast(Any, self.module).layer_idx)

    def spec(self, **fields: Any) -> AttentionSpec:
        """The spec of this module's attention.

        Args:
            fields: how the keys are stored and masked.
        """
        own = {"has_sink": self.sinks is not None, "logits_soft_cap": self.soft_cap}
        return _spec(
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_size=self.query.shape[3],
            head_size_v=self.value.shape[3],
            dtype=self.query.dtype,
            **{**own, **fields},
        )


@lru_cache(maxsize=256)
def _spec(**fields: Any) -> AttentionSpec:
    """A spec; cached, because checking it is slower than finding a layer."""
    return AttentionSpec(**fields)


@dataclass(frozen=True, eq=False)
class _CachedLayer:
    """A layer, and what it was created from.

    Attributes:
        layer: the layer.
        scale, sinks: as in the call.
        sinks_version: version counter of `sinks`; -1 where it has none.
    """

    layer: Attention
    scale: float
    sinks: torch.Tensor | None
    sinks_version: int


_layers: WeakKeyDictionary[nn.Module, dict[tuple[AttentionSpec, torch.device], _CachedLayer]] = (
    WeakKeyDictionary()
)
_local = threading.local()

_MAX_LAYERS = 64
"""Layers of one module. A module has one for each window or chunk that its masks describe."""
_MAX_BUILDERS = 128
"""Builders of one thread."""


def layer_for(call: Call, spec: AttentionSpec) -> Attention:
    """The attnlib layer of a module for a spec.

    Raises:
        UnknownBackendError, BackendUnavailableError, UnsupportedConfigError: see
            `get_attn_backend`.
    """
    device = call.query.device
    name = layer_name(call.module)
    backend = get_attn_backend(spec, None, device, layer_name=name)
    if is_transient() and not graphs_record(backend):
        backend = recorded_backend(spec, device, backend)
    layers = _layers.setdefault(call.module, {})
    cached = layers.get((spec, device))
    if cached is None or not _is_current(cached, call, backend):
        layer = Attention(
            spec,
            backend=backend,
            scale=call.scale,
            sinks=call.sinks,
            prefix=name,
            device=device,
            score_tensors=_score_tensors(spec, device),
        )
        cached = _CachedLayer(layer, call.scale, call.sinks, tensor_version(call.sinks))
        if len(layers) >= _MAX_LAYERS:
            layers.clear()
        layers[spec, device] = cached
        logger.debug("%s: runs on %s", name, backend.get_name())
    return cached.layer


def builder_for(
    backend: type[AttentionBackend], spec: AttentionSpec, device: torch.device
) -> AttentionMetadataBuilder[Any]:
    """The metadata builder that all layers of a spec share.

    There is one per thread, because the workspace of a builder serves one step at a time. A
    transient call has its own.
    """
    if is_transient():
        return backend.make_builder(spec, device)
    builders: dict[Any, AttentionMetadataBuilder[Any]] | None = getattr(_local, "builders", None)
    if builders is None:
        builders = _local.builders = {}
    key = (backend, spec, device)
    if key not in builders:
        if len(builders) >= _MAX_BUILDERS:
            builders.clear()
        builders[key] = backend.make_builder(spec, device)
    return builders[key]


@contextmanager
def transient() -> Iterator[None]:
    """Calls that keep no tensors: a CUDA graph is recorded, or the memory of one is in use."""
    before = is_transient()
    _local.transient = True
    try:
        yield
    finally:
        _local.transient = before


def is_transient() -> bool:
    """Whether this thread is inside of `transient`."""
    return bool(getattr(_local, "transient", False))


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Private to torch, and what Triton asks; an object for the stream takes several times as long."""


def current_stream(device: torch.device) -> int:
    """The current stream, 0 on a CPU: two streams have batches of their own."""
    if device.type != "cuda":
        return 0
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


def layer_name(module: nn.Module) -> str:
    """The name of a module in messages: its class and its layer index."""
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__}.{index}"


def _score_tensors(spec: AttentionSpec, device: torch.device) -> dict[str, torch.Tensor] | None:
    """Zeros for the layer tensors of `relative_bias`, which the calls fill; None without any."""
    function = spec.score_function
    if function is None or not function.layer_tensors:
        return None
    columns = 2 * int(dict(function.constants)["max_distance"]) + 1
    return {"bias": torch.zeros(spec.num_heads, columns, dtype=torch.float32, device=device)}


def _is_current(cached: _CachedLayer, call: Call, backend: type[AttentionBackend]) -> bool:
    """Whether a layer still has the backend, the scale and the sinks of the call.

    The layer holds a float32 copy of the sinks, so replaced or modified sinks need a new layer.
    """
    same_sinks = cached.sinks is call.sinks and cached.sinks_version == tensor_version(call.sinks)
    return cached.layer.backend is backend and cached.scale == call.scale and same_sinks


def tensor_version(tensor: torch.Tensor | None) -> int:
    """The version counter of a tensor; -1 for None and for inference tensors, which have none."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version
