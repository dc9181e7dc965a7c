"""What decides which kernels a layer launches, as text for notes (`warmup_steps`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.layer.attention import Attention
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.ops.dispatch import runs_kernels
from attnlib.ops.scales import MIN_LATE_SCALE
from attnlib.workspace import BatchLimits

__all__ = ["kernel_facts"]

_KNOWN = "attnlib.backends.triton"
"""The backend whose kernels follow from these facts; others may run code that is not attnlib's. For
a described GPU it is a subclass in a module below this one."""


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
    is_known = f"{backend.__module__}.".startswith(f"{_KNOWN}.")
    if not runs_kernels(device) or not is_known or spec.has_open_format:
        return None
    if spec.score_function is not None or not type(builder).__module__.startswith(f"{_KNOWN}."):
        return None
    from attnlib.ops.triton.heuristics.device import device_limits

    chip = device_limits(device)
    # No kernel is specialized on a float, but some do not serve small scales.
    scale = layer.impl.scale > 0, layer.impl.scale >= MIN_LATE_SCALE
    facts: list[Any] = [
        *(spec, sorted(builder.config.items()), limits, builder.limits, columns),
        *(builder.reorder_batch_threshold, replace(chip, name=_model(chip.name)), *scale),
        *(layer.k_scale, layer.v_scale),
    ]
    if cache is not None:
        tensors = (cache.key_cache, cache.value_cache, cache.k_scale, cache.v_scale)
        formats = [stored and (stored.name, stored.version) for stored in cache.page_formats]
        facts += [formats, cache.rotation, *tensors]
    facts += [*layer.impl.per_head_tensors]
    return repr([_form(x) if isinstance(x, torch.Tensor) else x for x in facts])


def _model(name: str) -> str:
    """The model in a driver's name: H100 of "NVIDIA H100 80GB HBM3"."""
    return name.upper().removeprefix("NVIDIA ").replace("-", " ").partition(" ")[0]


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    """What launches depend on of a tensor; not its number of blocks."""
    return x.dtype, x.shape[1:], x.stride(), x.data_ptr() % 16
