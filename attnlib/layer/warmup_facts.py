"""What decides which kernels a layer launches, as text for notes (`warmup_steps`)."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.layer.attention import Attention
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.workspace import BatchLimits

__all__ = ["kernel_facts"]

_KNOWN = "attnlib.backends.triton"
"""The backend whose kernels follow from these facts; others may run code that is not attnlib's."""


def kernel_facts(
    layer: Attention,
    cache: PagedKVCache | None,
    limits: BatchLimits,
    builder: AttentionMetadataBuilder[Any],
    columns: int,
) -> str | None:
    """The facts; None for layers whose kernels depend on more, such as functions of a user.

    Args:
        layer, cache, limits, builder: as of `warmup`.
        columns: of the block table.
    """
    spec, backend, device = layer.spec, layer.backend, builder.device
    if device.type != "cuda" or backend.__module__ != _KNOWN or spec.has_open_format:
        return None
    if spec.score_function is not None or not type(builder).__module__.startswith(f"{_KNOWN}."):
        return None
    from attnlib.ops.triton.heuristics.device import device_limits

    facts: list[Any] = [
        *(spec, backend.__qualname__, sorted(builder.config.items()), limits, builder.limits),
        *(builder.reorder_batch_threshold, columns, device_limits(device), layer.impl.scale),
        *(torch.cuda.get_device_name(device), layer.k_scale, layer.v_scale),
    ]
    if cache is not None:
        tensors = (cache.key_cache, cache.value_cache, cache.k_scale, cache.v_scale)
        formats = [stored and (stored.name, stored.version) for stored in cache.page_formats]
        facts += [cache.layout, formats, cache.rotation, *tensors]
    facts += [*layer.impl.per_head_tensors]
    return repr([_form(x) if isinstance(x, torch.Tensor) else x for x in facts])


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    """What launches depend on of a tensor; not its number of blocks."""
    return x.dtype, x.shape[1:], x.stride(), x.data_ptr() % 16
