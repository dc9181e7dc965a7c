"""Scales of a quantized cache: one per tensor or KV head (M9), or in the pages (M16)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnlib.errors import ContractError
from attnlib.kv_dtype import KVFormat
from attnlib.ops.scales import check_scale

if TYPE_CHECKING:
    from attnlib.cache.storage import PagedKVCache

__all__ = [
    "UNIT_SCALE",
    "ScaleResets",
    "Scale",
    "check_equal_scales",
    "check_page_scales",
    "check_same_kind",
    "checked_scale",
]

Scale = float | torch.Tensor

UNIT_SCALE: float = 1.0
"""The default scale. A layer whose scale is this object uses the scales of its cache."""


class ScaleResets:
    """The method of `PagedKVCache` that lets a step calculate scales again.

    Attributes:
        scale_epoch: resets so far. Elements of another epoch have other scales.
        awaits_scales: names of the scales that the next calculated ones replace.
    """

    scale_epoch: int = 0
    awaits_scales: frozenset[str] = frozenset()

    if TYPE_CHECKING:

        @property
        def dtype(self) -> torch.dtype: ...

        @property
        def page_format(self) -> KVFormat | None: ...

    def reset_scales(self) -> None:
        """Forget the scales of a quantized cache (M9), after the weights of the model have changed:
        the next step with `enable_kv_scales_calculation`, or `Attention.calc_kv_scales` before it,
        sets them again. Tensors keep their memory, so that CUDA graphs and plans stay valid.

        The caller vouches that no block is in use and that no prefix is kept: stored elements would
        change their values. A cache with scales in the page, or without scales, needs no reset.
        """
        if self.dtype.itemsize == 1 and self.page_format is None:
            names = frozenset(("k_scale", "v_scale"))
            self.__dict__.update(scale_epoch=self.scale_epoch + 1, awaits_scales=names)


def checked_scale(name: str, scale: Scale, view: torch.Tensor) -> Scale:
    """A valid scale of a cache.

    Raises:
        ContractError: a number that is not finite and positive, or a tensor of another dtype,
            shape, stride or device than the cache needs.
    """
    is_number = not isinstance(scale, torch.Tensor)
    if is_number:
        check_scale(name, scale)
    if view.dtype.itemsize > 1 and not (is_number and scale == UNIT_SCALE):
        raise ContractError(
            f"{name}={scale} of a cache of {view.dtype}: writes scale quantized elements only; "
            "leave it out, or allocate the cache with kv_cache_dtype='fp8'",
            rule="M9",
        )
    if not isinstance(scale, torch.Tensor):
        return float(scale)
    heads = view.shape[2]
    if scale.numel() == 1 and scale.dim() == 1 and heads != 1:
        scale = scale.reshape(())  # a view: later changes in place are seen
    if (
        scale.dtype != torch.float32
        or scale.shape not in ((), (heads,))
        or scale.device != view.device
        or (scale.dim() == 1 and scale.numel() > 1 and not scale.is_contiguous())
    ):
        raise ContractError(
            f"{name} is {scale.dtype} {tuple(scale.shape)} with strides {scale.stride()} on "
            f"{scale.device}; it must be float32, a scalar or contiguous [{heads}] (KV heads), on "
            f"{view.device}",
            rule="M9",
        )
    return scale


def check_page_scales(name: str, scales: Any, view: torch.Tensor, stored: KVFormat) -> None:
    """Whether the scales belong to the elements of `view` (M16).

    Raises:
        ContractError: another dtype, shape or device, or a last stride that is not 1.
    """
    wanted = (*view.shape[:3], stored.num_scales(stored.head_size(view.shape[3])))
    if (
        not isinstance(scales, torch.Tensor)
        or (scales.dtype, tuple(scales.shape)) != (stored.scale_dtype, wanted)
        or scales.device != view.device
        or (scales.stride(3) != 1 and wanted[3] > 1)
    ):
        raise ContractError(
            f"{name} is {scales if not isinstance(scales, torch.Tensor) else scales.dtype} "
            f"{list(getattr(scales, 'shape', []))}; a cache of {stored.name} has its scales in the "
            f"page: {stored.scale_dtype} {list(wanted)} on {view.device}, last stride 1",
            rule="M16",
        )


def check_equal_scales(name: str, source: Scale, destination: Scale) -> None:
    """Refuse to copy quantized elements to where another scale would change their value."""
    if source is destination:
        return
    values = [
        torch.as_tensor(scale, dtype=torch.float32, device="cpu") for scale in (source, destination)
    ]
    if not bool((values[0] == values[1]).all()):
        raise ContractError(
            f"swap_blocks copies quantized elements as stored, but {name} is {values[0].tolist()} "
            f"in the source and {values[1].tolist()} in the destination: give both caches the same "
            f"scales",
            rule="M9",
        )


def check_same_kind(cache: PagedKVCache, other: PagedKVCache) -> None:
    """Whether blocks of one cache can be blocks of another.

    Raises:
        ContractError: they differ in sizes, format, rotation or scales of stored elements.
    """
    if not isinstance(other, type(cache)):
        raise ContractError(
            f"swap_blocks copies to a {type(other).__name__}; it must be a {type(cache).__name__}"
        )
    kind = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "page_formats")
    for name in (*kind, "rotation"):
        mine, theirs = getattr(cache, name), getattr(other, name)
        if mine != theirs:
            raise ContractError(
                f"swap_blocks needs caches of one kind: {name} is {mine} in the source and "
                f"{theirs} in the destination"
            )
    if cache.dtype.itemsize == 1 and cache.page_format is None:
        if cache.scale_epoch != other.scale_epoch:
            raise ContractError(
                f"swap_blocks copies quantized elements as stored, but scale_epoch is "
                f"{cache.scale_epoch} in the source and {other.scale_epoch} in the destination: "
                "the others were stored before reset_scales; drop them, and reset both caches",
                rule="M9",
            )
        for name in ("k_scale", "v_scale"):
            check_equal_scales(name, getattr(cache, name), getattr(other, name))
