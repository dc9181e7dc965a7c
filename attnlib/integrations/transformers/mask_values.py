"""Masks that come as tensors: recognized by their values.

A static cache gets its mask before the model runs, as a tensor that compiled code can take, and a
user may pass one. If its values are those of causality, a window and padding, kernels apply it as
arguments. Every value is compared: nothing is guessed from a part of them.
"""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import ref

import torch

from attnlib.integrations.transformers.layers import is_transient, tensor_version
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.spec import Window

__all__ = ["step_of_values", "visible_keys"]

_MAX_KNOWN = 8
"""Masks of one thread whose description is kept."""

_local = threading.local()


class _Known(NamedTuple):
    """The description of a mask that was recognized, valid while the tensor is unchanged."""

    mask: ref[torch.Tensor]
    version: int
    sizes: tuple[int, int, int, int | None]
    step: StepMask | None


def visible_keys(mask: torch.Tensor, keys: int) -> torch.Tensor | None:
    """The keys that single queries see, `[B or 1, S]` bool; None for other masks.

    Args:
        mask: `[B or 1, 1, 1, S]`, bool.
        keys: S.
    """
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        return None
    return mask[:, 0, 0] if mask.shape[3] == keys else None


def step_of_values(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, window: int | None
) -> StepMask | None:
    """The description of a mask, or None if no kernel argument expresses its values.

    Reads the mask: synchronizes on a GPU. The description is kept with the tensor where the tensor
    counts its modifications.

    Args:
        mask: `[B or 1, 1, T, S]`, True or 0 where visible, False or the lowest number elsewhere.
        query: `[B, Hq, T, D]`.
        key: `[B, Hkv, S, D]`.
        window: W keys that the layer's window leaves visible; None for all.
    """
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if mask.shape[1] != 1 or mask.shape[2] != queries or mask.shape[3] != keys:
        return None
    if mask.shape[0] not in (1, batch):
        return None
    known: list[_Known] = _local.__dict__.setdefault("known", [])
    sizes, version = (batch, queries, keys, window), tensor_version(mask)
    for found in known:
        if found.mask() is mask and found.version == version and found.sizes == sizes:
            return found.step
    visible = _visible(mask.data)  # a view of the mask would keep it
    step = None if visible is None else _described(visible, batch, window)
    if version >= 0 and not is_transient():
        alive = [other for other in known if other.mask() is not None]
        known[:] = [*alive[-_MAX_KNOWN:], _Known(ref(mask), version, sizes, step)]
    return step


def _visible(mask: torch.Tensor) -> torch.Tensor | None:
    """The mask as bool; None where it adds other numbers than 0 and the lowest."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        return None
    visible = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min
    return visible if bool((visible | hidden).all()) else None


def _described(visible: torch.Tensor, batch: int, window: int | None) -> StepMask | None:
    """The description of `[B or 1, 1, T, S]` bool, whose columns are the keys of the call."""
    _, _, queries, keys = visible.shape
    seen = visible[:, 0].any(1)
    columns = seen.any(0).nonzero()
    if not columns.numel():
        return None
    width = int(columns[-1]) + 1
    found = None
    if queries == 1:
        found = Pattern(True, Window(None, 0)), width - 1
    else:
        ends = [end for end in dict.fromkeys((keys, width)) if end >= queries]
        sizes = dict.fromkeys((window if window is not None and window < width else None, None))
        for end in ends:
            for size in sizes:
                pattern = Pattern(True, Window(None if size is None else size - 1, 0))
                if torch.equal(visible[:, 0], _causal(seen, queries, end - queries, size)):
                    found = pattern, end - queries
                    break
            if found is not None:
                break
        if found is None and torch.equal(visible[:, 0], seen[:, None].expand(-1, queries, -1)):
            found = Pattern(False), 0
    if found is None:
        return None
    pattern, offset = found
    end = min(keys, offset + queries) if pattern.causal else keys
    padding = None if bool(seen[:, :end].all()) else seen[:, :end].expand(batch, -1)
    device = visible.device
    step = StepMask(
        pattern,
        batch,
        queries,
        keys,
        offset,
        attention_mask=padding,
        device=device,
        is_reused=True,
    )
    step.plans["dense"] = visible
    return step


def _causal(seen: torch.Tensor, queries: int, offset: int, window: int | None) -> torch.Tensor:
    """The values `[B or 1, T, S]` of a causal mask over the keys that any query sees."""
    columns = torch.arange(seen.shape[1], device=seen.device)
    rows = torch.arange(queries, device=seen.device)[:, None] + offset
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    return visible & seen[:, None]
