"""KV scales of a layer and of its cache (M9)."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch

from attnlib.backends.rotated import RotatedImpl
from attnlib.cache.storage import UNIT_SCALE, PagedKVCache, Scale
from attnlib.errors import ContractError
from attnlib.ops.scales import check_scale, scale_for
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer.attention import Attention

_log = logging.getLogger("attnlib")

__all__ = [
    "agree_on_scales",
    "calculate_scales",
    "checked_layer_scale",
    "set_scales",
]


def checked_layer_scale(name: str, scale: Scale, spec: AttentionSpec) -> Scale:
    """A scale that a cache would accept; its device is checked with the cache.

    Raises:
        ContractError: a number that is not finite and positive, a tensor of another dtype or shape,
            or a scale for a format that has its scales in the page.
    """
    is_one = not isinstance(scale, torch.Tensor) and scale == UNIT_SCALE
    if spec.scales_in_page and not is_one:
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


def set_scales(layer: Attention, key: torch.Tensor, value: torch.Tensor) -> None:
    """See `Attention.calc_kv_scales`."""
    spec = layer.spec
    if not spec.is_kv_quantized or spec.scales_in_page:
        return
    for name, given in (("key", key), ("value", value)):
        if not isinstance(given, torch.Tensor):
            raise ContractError(f"{name} is a {type(given).__name__}; it must be a tensor")
    largest = torch.finfo(spec.kv_dtype).max
    key, value = _as_stored(layer, key, value)
    layer.k_scale = scale_for(key, largest)
    layer.v_scale = layer.k_scale if spec.use_mla else scale_for(value, largest)


def agree_on_scales(layer: Attention, cache: PagedKVCache) -> None:
    """Make the scales of layer and cache one object: the layer's become those of its cache.

    Values are compared once, and then the objects are the same.

    Raises:
        ContractError: the cache already has other scales; it belongs to another layer.
    """
    for name in ("k_scale", "v_scale"):
        ours, theirs = getattr(layer, name), getattr(cache, name)
        if ours is theirs or ours is UNIT_SCALE:
            continue
        awaits = name in cache.awaits_scales
        fresh = awaits or (isinstance(theirs, float) and theirs == 1.0)
        if not fresh and not _equal_scales(ours, theirs):
            raise ContractError(
                f"{name} of layer {layer.prefix or '(unnamed)'} is {ours}, that of its cache is "
                f"{theirs}: they must agree; to calculate them again, drop all blocks and call "
                "cache.reset_scales()",
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
            if awaits and isinstance(theirs, torch.Tensor):
                # Graphs and plans hold its address.
                theirs.copy_(torch.as_tensor(ours, device=theirs.device))
            else:
                setattr(cache, name, ours)
            setattr(layer, name, getattr(cache, name))
            cache.__dict__["awaits_scales"] = cache.awaits_scales - {name}


def calculate_scales(
    layer: Attention,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache,
    slots: torch.Tensor | None,
) -> None:
    """Scales from the keys and values that a step writes, once: a layer or a cache that has scales
    keeps them, because they hold for everything that the cache stores. A step that writes no finite
    element besides zeros, like a dummy run, leaves them unset. Synchronizes.

    Args:
        layer: a layer whose batch has `enable_kv_scales_calculation`.
        key, value: `[T, Hkv, D]` and `[T, Hkv, Dv]`, or None.
        cache: of the layer.
        slots: of the batch.

    Raises:
        ContractError: a CUDA graph is being captured.
    """
    if key is None or value is None or slots is None or not layer.writes:
        return
    spec = layer.spec
    if not spec.is_kv_quantized or spec.scales_in_page:
        return
    unset = [name for name in ("k_scale", "v_scale") if _is_unset(layer, cache, name)]
    if not unset and layer._has_calculated:
        _warn_of_old_scales()
    if not unset or (len(unset) == 1 and not layer._has_calculated):
        return  # what a caller gives for one is meant for both
    if key.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ContractError(
            "enable_kv_scales_calculation computes new scales, which a CUDA graph would "
            "compute at each replay: run one step without a graph first",
            rule="M9",
        )
    key, value = _as_stored(layer, key, value)
    unwritten, rows = (slots < 0)[:, None, None], slots.shape[0]
    new = [tensor[:rows].masked_fill(unwritten, 0) for tensor in (key, value)]
    say_something = torch.stack([(x.isfinite() & (x != 0)).any() for x in new]).tolist()
    largest = torch.finfo(spec.kv_dtype).max
    for name, tensor, says in zip(("k_scale", "v_scale"), new, say_something, strict=True):
        if spec.use_mla and name == "v_scale":
            layer.v_scale = layer.k_scale
        elif says and name in unset:
            setattr(layer, name, scale_for(tensor, largest))
            layer.__dict__["_has_calculated"] = True


def _as_stored(
    layer: Attention, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with the rotation of the cache, if it has one (P15)."""
    impl, spec = layer.impl, layer.spec
    if not isinstance(impl, RotatedImpl):
        return key, value
    key = key.reshape(-1, spec.num_kv_heads, spec.head_size)
    return impl.rotated_kv(key, value.reshape(-1, spec.num_kv_heads, spec.head_size_v))


@functools.lru_cache(maxsize=1)  # once, not per layer and step
def _warn_of_old_scales() -> None:
    _log.warning(
        "a batch has enable_kv_scales_calculation, and its layers keep the scales of an earlier "
        "step, because the cache has elements with them; where the weights have changed, drop all "
        "blocks and call cache.reset_scales() before"
    )


def _is_unset(layer: Attention, cache: PagedKVCache, name: str) -> bool:
    if name in cache.awaits_scales:
        return True
    both = (getattr(layer, name), getattr(cache, name))
    return all(isinstance(scale, float) and scale == UNIT_SCALE for scale in both)


def _equal_scales(ours: Scale, theirs: Scale) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == theirs
    both = [torch.as_tensor(scale, device="cpu").float().reshape(-1) for scale in (ours, theirs)]
    return bool(torch.equal(*both))
