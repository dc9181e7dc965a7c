"""What runs an impl in vLLM's style, without the contract of `attnlib.Attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib.compat.vllm.impls import run_impl
from attnlib.kv_dtype import kv_cache_torch_dtype
from attnlib.ops.scales import scale_for

__all__ = ["DirectLayer"]


@dataclass
class DirectLayer:
    """Stands in `compat.vllm.Attention` for the `attnlib.Attention` of other backends.

    Attributes:
        backend: a backend class in vLLM's style.
        impl: of the layer.
        kv_cache_dtype: what the cache stores.
        num_heads, num_kv_heads, head_size: of the layer.
    """

    backend: Any
    impl: Any
    kv_cache_dtype: str
    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def width(self) -> int:
        """Elements of the output of one token."""
        return self.num_heads * self.head_size

    def attend(
        self,
        owner: object,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: object,
        attn_metadata: object,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        """The output of the impl.

        Args:
            owner: the layer that the impl gets.
            query, key, value: flat or per head.
            kv_cache, attn_metadata: as the impl reads them.
            shape: of the result, `[T, Hq * Dv]` or another view of it.
        """
        rows = query.shape[0]
        query = query.view(rows, self.num_heads, self.head_size)
        if key is not None and key.dim() == 2:
            key = key.view(rows, self.num_kv_heads, key.shape[1] // self.num_kv_heads)
        if value is not None and value.dim() == 2:
            value = value.view(rows, self.num_kv_heads, value.shape[1] // self.num_kv_heads)
        output = query.new_zeros(shape)
        size = output.numel() // (rows * self.num_heads) if rows else self.head_size
        heads = output.view(rows, self.num_heads, size)
        run_impl(self.impl, owner, query, key, value, kv_cache, attn_metadata, heads)
        return output

    def scales_of(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Scales that store the largest element of each tensor as the largest number of the cache's
        dtype; 1 for a cache that is not quantized."""
        found = []
        for tensor in tensors:
            stored = kv_cache_torch_dtype(self.kv_cache_dtype, tensor.dtype)
            scale = torch.ones((), dtype=torch.float32, device=tensor.device)
            if stored.itemsize == 1:
                scale = scale_for(tensor, torch.finfo(stored).max)
            found.append(scale)
        return found

    def extra_repr(self) -> str:
        """Sizes and backend, for `print(model)`."""
        sizes = (f"{n}={getattr(self, n)}" for n in ("num_heads", "num_kv_heads", "head_size"))
        return f"{', '.join(sizes)}, backend={self.backend.__name__}"
