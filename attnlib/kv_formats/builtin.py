"""The library's own formats with scales in the page (M16)."""

from __future__ import annotations

import torch

from attnlib.kv_formats import conversions as to
from attnlib.kv_formats.declaration import KVFormat

__all__ = ["PAGE_FORMATS"]

PAGE_FORMATS: dict[str, KVFormat] = {
    found.name: found
    for found in (
        KVFormat(
            name="int8_per_token_head", dtype=torch.int8, bits=8, scale_dtype=torch.float32,
            groups_per_head=1, largest=127.0, error=0.02, encode=to.encode_int8,
            decode=to.decode_int8,
        ),
        KVFormat(
            name="fp8_per_token_head", dtype=torch.float8_e4m3fn, bits=8,
            scale_dtype=torch.float32, groups_per_head=1, largest=448.0, error=0.03,
            encode=to.encode_fp8, decode=to.decode_fp8,
        ),
        KVFormat(
            name="int4_per_group", dtype=torch.uint8, bits=4, scale_dtype=torch.float16,
            groups_per_head=4, largest=7.0, head_size_multiple=8, error=0.14,
            encode=to.encode_int4, decode=to.decode_int4,
        ),
        KVFormat(
            name="nvfp4", dtype=torch.uint8, bits=4, scale_dtype=torch.uint8,
            elements_per_group=16, largest=6.0, head_size_multiple=16, error=0.12, span=(0.2, 400),
            encode=to.encode_nvfp4, decode=to.decode_nvfp4,
        ),
        KVFormat(
            name="mxfp4", dtype=torch.uint8, bits=4, scale_dtype=torch.uint8,
            elements_per_group=32, largest=6.0, head_size_multiple=32, error=0.17,
            encode=to.encode_mxfp4, decode=to.decode_mxfp4,
        ),
    )
}  # fmt: skip
"""The formats with scales in the page, by name."""
