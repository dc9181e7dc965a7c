"""KV scales of a layer and of its cache (M9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlib.cache.storage import UNIT_SCALE, PagedKVCache, Scale
from attnlib.errors import ContractError
from attnlib.ops.scales import check_scale
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer.plans import PlannedLayer

__all__ = ["agree_on_scales", "checked_layer_scale"]


def checked_layer_scale(name: str, scale: Scale, spec: AttentionSpec) -> Scale:
    """A scale that a cache would accept; its device is checked with the cache.

    Raises:
        ContractError: a number that is not finite and positive, a tensor of another dtype or shape,
            or a scale for a format that has its scales in the page.
    """
    is_one = not isinstance(scale, torch.Tensor) and scale == UNIT_SCALE
    if spec.kv_format.scales_in_page and not is_one:
        raise ContractError(
            f"{name} is given, but kv_cache_dtype={spec.kv_format.name} computes a scale for each "
            "token and head: leave it out",
            rule="M16",
        )
    if not isinstance(scale, torch.Tensor):
        check_scale(name, scale)
        return UNIT_SCALE if scale == 1.0 else float(scale)
    if scale.dtype != torch.float32 or scale.shape not in ((), (1,), (spec.num_kv_heads,)):
        raise ContractError(
            f"{name} is {scale.dtype} {tuple(scale.shape)}; it must be float32, a scalar or "
            f"[{spec.num_kv_heads}] (KV heads)",
            rule="M9",
        )
    return scale


def agree_on_scales(layer: PlannedLayer, cache: PagedKVCache) -> None:
    """Make the scales of layer and cache one object: the layer's become those of its cache.

    Values are compared once, and then the objects are the same.

    Raises:
        ContractError: the cache already has other scales; it belongs to another layer.
    """
    for name in ("k_scale", "v_scale"):
        ours, theirs = getattr(layer, name), getattr(cache, name)
        if ours is theirs or ours is UNIT_SCALE:
            continue
        fresh = isinstance(theirs, float) and theirs == 1.0
        if not fresh and not _equal_scales(ours, theirs):
            raise ContractError(
                f"{name} of layer {layer.prefix or '(unnamed)'} is {ours}, that of its cache is "
                f"{theirs}: they must agree",
                rule="M9",
            )
        if layer.spec.kv_sharing:  # the cache is another layer's
            if fresh:
                raise ContractError(
                    f"layer {layer.prefix or '(unnamed)'} shares its cache and has "
                    f"{name}={ours}, but the cache has no scale: pass the scale to the layer "
                    "that writes the cache",
                    rule="P8",
                )
            setattr(layer, name, theirs)
        else:
            setattr(cache, name, ours)
            setattr(layer, name, getattr(cache, name))


def _equal_scales(ours: Scale, theirs: Scale) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == theirs
    both = [torch.as_tensor(scale, device="cpu").float().reshape(-1) for scale in (ours, theirs)]
    return bool(torch.equal(*both))
