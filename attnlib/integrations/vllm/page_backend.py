"""Caches whose pages hold their scales (M16): one class of backend per name of `format_names`.

vLLM asks a class about its pages without saying which format the user named, so that each name
has a class, an attribute of this module. A page is one region of consecutive bytes, of the size
that vLLM 0.26 computes for its own formats of the same name; vLLM 0.33 takes any size.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch

from attnlib.integrations.vllm.backend import AttnlibBackend
from attnlib.integrations.vllm.format_names import is_page_name, stored_fields
from attnlib.integrations.vllm.layer_spec import KV_CACHE_DTYPES
from attnlib.kv_dtype import KVFormat, kv_cache_format

__all__ = ["PageBackend", "backend_of"]


class PageBackend(AttnlibBackend):
    """attnlib over pages of one kind. Layers that the user excludes from quantization have this
    class, too, and a cache of their own dtype.

    Attributes:
        stored_name: value of `--kv-cache-dtype`.
        formats: of keys and of values.
    """

    stored_name: ClassVar[str]
    formats: ClassVar[tuple[KVFormat, KVFormat]]

    @classmethod
    def _content_bytes(cls, head_size: int, head_size_v: int) -> int:
        """Bytes of the key and the value of one head of one token, with their scales."""
        keys, values = cls.formats
        return keys.bytes_per_head(head_size) + values.bytes_per_head(head_size_v)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """vLLM's spec of a layer with the bytes of the pages (0.33)."""
        if not spec.kv_quant_mode or spec.state_content_bytes is not None:
            return spec
        content = cls._content_bytes(spec.head_size, spec.head_size_v)
        return replace(spec, state_content_bytes=content)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """The layouts in which a page is one region of bytes (0.33)."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return tuple(layout for layout in KVCacheLayout if layout.is_block_contiguous)

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """`[B, Hkv, N, bytes]`, or that of a layer that is not quantized (0.26)."""
        if cache_dtype_str != cls.stored_name:
            return super().get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)
        return num_blocks, num_kv_heads, block_size, cls._content_bytes(head_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """A page is one region of bytes, whatever VLLM_KV_CACHE_LAYOUT says (0.26)."""
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)


@functools.cache
def backend_of(name: str) -> type[PageBackend]:
    """The class of a name of pages (`is_page_name`)."""
    fields = stored_fields(name)
    # A side in the dtype of the model is named by it.
    keys, values = fields["kv_cache_dtype"], fields["value_cache_dtype"]
    formats = tuple(kv_cache_format(side, torch.float32) for side in (keys, values or keys))
    found: type[PageBackend] = type(
        name,
        (PageBackend,),
        {
            "stored_name": name,
            "formats": formats,
            "supported_kv_cache_dtypes": [*KV_CACHE_DTYPES, name],
            "__module__": __name__,  # vLLM imports the class by its path
            "__doc__": f"attnlib over pages of {name}.",
        },
    )
    return found


def __getattr__(name: str) -> Any:
    """The class of the pages `name`."""
    if not is_page_name(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return backend_of(name)
