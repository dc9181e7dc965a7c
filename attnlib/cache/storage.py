"""The cache of one layer: two strided views over one or two allocations (P1).

`key_cache` is `[B, N, Hkv, D]` and `value_cache` `[B, N, Hkv, Dv]` in every layout; only the
strides differ. `ops.block_moves` copies and zeroes whole blocks.
"""

from __future__ import annotations

from typing import Any

import torch

from attnlib.cache.engine_layouts import EngineLayouts
from attnlib.cache.layout import get_kv_cache_layout
from attnlib.cache.moves import BlockMoves, BlockPairs
from attnlib.cache.pages import Formats, page_bytes, page_layout, page_shape, page_views
from attnlib.cache.pickling import picklable_state, restored_state
from attnlib.cache.scales import UNIT_SCALE, Scale, ScaleResets, check_page_scales, checked_scale
from attnlib.cache.sizes import CacheSizes
from attnlib.cache.views import CacheSignature, allocated_views, check_views, recognized_layout
from attnlib.compile.objects import register_tensor_id
from attnlib.device import explains_device
from attnlib.errors import ContractError
from attnlib.kv_dtype import KVFormat, page_format
from attnlib.kv_rotation import KVRotation
from attnlib.ops.addresses import as_count
from attnlib.ops.signature import scale_signature, tensor_signature
from attnlib.spec import AttentionSpec

__all__ = ["BlockPairs", "PagedKVCache", "Scale", "UNIT_SCALE"]


class PagedKVCache(CacheSizes, BlockMoves, ScaleResets, EngineLayouts):
    """The keys and values of one layer in blocks.

    Attributes:
        key_cache: `[B, N, Hkv, D]`, any strides, the last one 1.
        value_cache: `[B, N, Hkv, Dv]`, likewise; interleaved, a separate allocation, or the keys.
            With a format of 4 bits, the last dimension of both is D / 2 bytes.
        layout: name of the memory layout, or None if the views match no known layout.
        k_scale, v_scale: stored value * scale = real value (M9): a float, float32 `[]` or `[Hkv]`.
            With scales in the page (M16), the views of these, `[B, N, Hkv, scales per head]`.
        page_formats: the formats with scales in the page of keys and values; None for others.
        pages: `[B, num_bytes]` uint8, the memory of such a cache; None for all others.
        rotation: how its heads are rotated (P15), or None. Assign it over memory of rotated heads.
    """

    rotation: KVRotation | None
    page_formats: tuple[KVFormat | None, KVFormat | None]
    pages: torch.Tensor | None
    _signature: CacheSignature | None

    def __init__(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        layout: str | None = None,
        k_scale: Scale = UNIT_SCALE,
        v_scale: Scale = UNIT_SCALE,
        formats: Formats | tuple[None, None] = (None, None),
    ) -> None:
        found = (
            page_format(key_cache, k_scale, formats[0]),
            page_format(value_cache, v_scale, formats[1]),
        )
        check_views(key_cache, value_cache, one_dtype=found == (None, None))
        self.page_formats = found
        self.pages = None
        self.rotation = None
        self.key_cache = key_cache
        self.value_cache = value_cache
        self.layout = layout
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.handle = register_tensor_id(self)

    def with_views(self, key_cache: torch.Tensor, value_cache: torch.Tensor) -> PagedKVCache:
        """A cache over other memory, with the scales and the signature of this one.

        Args:
            key_cache, value_cache: like the views of this cache, which is not checked again.
        """
        found = PagedKVCache.__new__(PagedKVCache)
        found.__dict__.update(
            self.__dict__, key_cache=key_cache, value_cache=value_cache, _signature=self.signature
        )
        found.__dict__["handle"] = register_tensor_id(found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("k_scale", "v_scale"):
            view = self.key_cache if name == "k_scale" else self.value_cache
            found = self.page_formats[name == "v_scale"]
            if found is None:
                value = checked_scale(name, value, view)
            else:
                check_page_scales(name, value, view, found)
        elif name == "rotation":
            value = KVRotation.of(value)
        state = self.__dict__
        state["_signature"] = None  # follows every attribute
        if name in ("key_cache", "value_cache"):
            # One of both may be assigned first, so the pair is checked at its next use.
            state["_assigned"] = "handle" in state
        state[name] = value

    def __getstate__(self) -> dict[str, Any]:
        sizes = (self.block_size, self.num_kv_heads, self.head_size, self.head_size_v)
        return picklable_state(self.__dict__, sizes)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(restored_state(state), _signature=None)
        self.handle = register_tensor_id(self)  # a copy is another cache

    @property
    def signature(self) -> CacheSignature:
        """What launches over this cache follow from besides addresses: dtypes, shapes, strides,
        layout, and what `scale_signature` tells of the scales."""
        key, value, found = self.key_cache, self.value_cache, self._signature
        sizes = CacheSignature.sizes(key, value)
        if found is None or found.views != sizes:
            if found is not None:  # `resize_`: as if the views had been assigned
                self.__dict__["_assigned"] = True
            self._check_assigned()
            scales = scale_signature(self.k_scale, key), scale_signature(self.v_scale, value)
            views = tensor_signature(key), tensor_signature(value)
            stored = (self.layout, self.rotation, self.page_formats, self.values_alias_keys)
            found = CacheSignature.of((*stored, *views, *scales), sizes)
            self.__dict__["_signature"] = found
        return found

    def _check_assigned(self) -> None:
        """Check views that were assigned after the cache was made.

        Raises:
            ContractError: they do not fit each other.
        """
        if self.__dict__.get("_assigned"):
            check_views(self.key_cache, self.value_cache, one_dtype=self.page_format is None)
            self.__dict__["_assigned"] = False

    @classmethod
    @explains_device
    @torch.inference_mode(False)  # writable in and outside of inference mode
    def allocate(
        cls,
        spec: AttentionSpec,
        num_blocks: int,
        device: torch.device | str | None = None,
        layout: str | None = None,
        *,
        k_scale: Scale = UNIT_SCALE,
        v_scale: Scale = UNIT_SCALE,
    ) -> PagedKVCache:
        """A zero-filled cache of `num_blocks` blocks in the dtype and block size of `spec`.

        Args:
            spec: heads, sizes, dtype and block size.
            num_blocks: blocks in the pool (B).
            device: None for torch's default device.
            layout: memory layout; None for `spec.kv_cache_layout`, else the override of
                `set_kv_cache_layout` or ATTNLIB_KV_CACHE_LAYOUT, else "NHD".
            k_scale, v_scale: scales of a quantized cache.

        Raises:
            ContractError: `num_blocks` is below 1, or `spec` is of no layer over pages.
            LayoutMismatchError: an unknown layout.
        """
        num_blocks = as_count("num_blocks", num_blocks, 1)
        AttentionSpec.check_kind(spec, "PagedKVCache.allocate")
        if not spec.is_paged:
            kind = f"attn_type={spec.attn_type.value}"
            raise ContractError(f"{kind} keeps no keys: call the layer with cache=None")
        wanted = layout or spec.kv_cache_layout or get_kv_cache_layout()
        if spec.scales_in_page:
            if not (k_scale is UNIT_SCALE and v_scale is UNIT_SCALE):
                raise ContractError(
                    f"kv_cache_dtype={spec.kv_format.name} computes a scale for each token and "
                    "head: pass no k_scale and v_scale",
                    rule="M16",
                )
            size = num_blocks, page_bytes(spec, wanted)
            return cls.from_pages(torch.zeros(size, dtype=torch.uint8, device=device), spec, wanted)
        key, value, name = allocated_views(spec, num_blocks, wanted or "NHD", device)
        cache = cls(key, value, layout=name, k_scale=k_scale, v_scale=v_scale)
        cache.rotation = spec.kv_rotation
        return cache

    @classmethod
    def from_pages(
        cls, pages: torch.Tensor, spec: AttentionSpec, layout: str | None = None
    ) -> PagedKVCache:
        """A cache with scales in the page (P13) over existing memory, without a copy.

        Args:
            pages: `[B, num_bytes]` uint8, at least `cache.pages.page_sizes(...)` bytes per page;
                any distance between pages that is a multiple of 16.
            spec: heads, sizes, format and block size.
            layout: a name of `cache.pages.PAGE_LAYOUTS`; None for `spec.kv_cache_layout`, else
                "HND_INTERLEAVED".

        Raises:
            ContractError: another kind of `spec`, or a format without scales in the page.
            LayoutMismatchError: no layout of a page.
        """
        AttentionSpec.check_kind(spec, "PagedKVCache.from_pages")
        if not spec.scales_in_page:
            raise ContractError(
                f"kv_cache_dtype={spec.kv_format.name} has no scales in the page: use allocate or "
                "from_views",
                rule="P13",
            )
        layout = page_layout(spec, layout)
        shape = page_shape(spec)
        *views, k_scale, v_scale = page_views(pages, *shape, layout)
        cache = cls(*views, layout=layout, formats=shape[0], k_scale=k_scale, v_scale=v_scale)
        cache.pages, cache.rotation = pages, spec.kv_rotation
        return cache

    @classmethod
    def from_views(
        cls,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        k_scale: Scale = UNIT_SCALE,
        v_scale: Scale = UNIT_SCALE,
    ) -> PagedKVCache:
        """A cache over existing memory, without a copy; `from_vllm` and others find the views.

        Args:
            key_cache: `[B, N, Hkv, D]`, any strides, the last one 1.
            value_cache: `[B, N, Hkv, Dv]`, likewise, same dtype and device.
            k_scale, v_scale: scales of a quantized cache, as the attributes.

        Raises:
            ContractError: the views have other shapes, or disagree with each other.
        """
        cache = cls(key_cache, value_cache, k_scale=k_scale, v_scale=v_scale)
        cache.layout = recognized_layout(key_cache, value_cache)
        return cache

    @property
    def block_views(self) -> tuple[torch.Tensor, ...]:
        """All memory of the blocks, `[B, ...]`: elements, and scales in the page."""
        self._check_assigned()
        scales = zip((self.k_scale, self.v_scale), self.page_formats, strict=True)
        in_pages = (x for x, found in scales if found is not None and isinstance(x, torch.Tensor))
        return (self.key_cache, self.value_cache, *in_pages)
