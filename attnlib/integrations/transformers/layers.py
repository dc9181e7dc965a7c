"""One attnlib `Attention` per attention module of the model, and one metadata builder per spec.

transformers hands over its module at every call; what belongs to it for good (backend, impl, scale, sinks) is made at the first call and found
again by the module itself, weakly, so it goes when the model goes. Selection is asked each time (it caches), so a changed ATTNLIB_BACKEND or
`use_backend` takes effect at the next call.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec

__all__ = ["Call", "builder_for", "layer_for", "layer_name"]

logger = logging.getLogger("attnlib")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the attention function, in transformers' shapes.

    Attributes:
        module: transformers' attention module.
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D]; in plain generation the history and the new tokens.
        value: [B, Hkv, S, Dv].
        scale: softmax scale.
        soft_cap: cap on the scores, or None.
        sinks: [Hq] sink logits, or None.
        sliding_window: W keys are visible, the query's own among them; None for all.
        causal: whether the module says so; a mask made by transformers knows better.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    soft_cap: float | None
    sinks: torch.Tensor | None
    sliding_window: int | None
    causal: bool

    @property
    def layer_idx(self) -> int:
        """The layer's place in transformers' paged cache."""
        return int(cast(Any, self.module).layer_idx)

    def spec(self, **fields: Any) -> AttentionSpec:
        """The spec of this module's attention; `fields` say how its keys are stored and masked."""
        return AttentionSpec(
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_size=self.query.shape[3],
            head_size_v=self.value.shape[3],
            dtype=self.query.dtype,
            logits_soft_cap=self.soft_cap,
            has_sink=self.sinks is not None,
            **fields,
        )


@dataclass(frozen=True, eq=False)
class _Entry:
    layer: Attention
    scale: float
    sinks: torch.Tensor | None
    sinks_version: int


_layers: WeakKeyDictionary[nn.Module, dict[tuple[AttentionSpec, torch.device], _Entry]] = (
    WeakKeyDictionary()
)
_local = threading.local()


def layer_for(call: Call, spec: AttentionSpec) -> Attention:
    """The attnlib layer of a module for a spec.

    Raises:
        UnknownBackendError, BackendUnavailableError, UnsupportedConfigError: as selection says.
    """
    device = call.query.device
    name = layer_name(call.module)
    backend = get_attn_backend(spec, None, device, layer_name=name)
    entries = _layers.setdefault(call.module, {})
    entry = entries.get((spec, device))
    if entry is None or not _still_fits(entry, call, backend):
        layer = Attention(
            spec, backend=backend, scale=call.scale, sinks=call.sinks, prefix=name, device=device
        )
        entry = _Entry(layer, call.scale, call.sinks, _version(call.sinks))
        entries[spec, device] = entry
        logger.debug("%s: runs on %s", name, backend.get_name())
    return entry.layer


def builder_for(
    backend: type[AttentionBackend], spec: AttentionSpec, device: torch.device
) -> AttentionMetadataBuilder[Any]:
    """The metadata builder that all layers of a spec share. One per thread: a builder lends its workspace to one step at a time."""
    builders: dict[Any, AttentionMetadataBuilder[Any]] | None = getattr(_local, "builders", None)
    if builders is None:
        builders = _local.builders = {}
    key = (backend, spec, device)
    if key not in builders:
        builders[key] = backend.make_builder(spec, device)
    return builders[key]


def layer_name(module: nn.Module) -> str:
    """What messages call a module: its class and its place in the model, which is all that it knows."""
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__}.{index}"


def _still_fits(entry: _Entry, call: Call, backend: type[AttentionBackend]) -> bool:
    """Sinks are copied (as float32) into the layer: new or rewritten ones make a new layer."""
    same_sinks = entry.sinks is call.sinks and entry.sinks_version == _version(call.sinks)
    return entry.layer.backend is backend and entry.scale == call.scale and same_sinks


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
