"""Backends in vLLM's style, over dense attention of gathered keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attnlib
from attnlib.compat.vllm import AttentionBackend
from attnlib.compat.vllm.backend_utils import AttentionMetadataBuilder
from tests.compat.reference import attention

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
SPEC = attnlib.AttentionSpec(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32, block_size=BLOCK
)
STEPS = (([5, 7], [5, 7]), ([1, 1], [6, 8]), ([3, 1], [9, 9]))
TABLES = [[3, 1], [6, 0]]


@dataclass
class Plan:
    """Metadata of a class of the program: the batch as the builder got it."""

    common: Any


class PlanBuilder(AttentionMetadataBuilder[Plan]):
    full_cudagraph_supported = True

    def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.config_given = kv_cache_spec, vllm_config  # no `super().__init__`

    def build(
        self, *, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Plan:
        return Plan(common_attn_metadata)


class Impl:
    """The arguments of vLLM, and an output that the layer gives."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **extra_impl_args: Any,
    ) -> None:
        self.sizes, self.scale = (num_heads, num_kv_heads, head_size), scale
        self.alibi_slopes, self.sliding_window = alibi_slopes, sliding_window
        self.logits_soft_cap, self.extra = logits_soft_cap, extra_impl_args
        self.shares = kv_sharing_target_layer_name is not None

    def forward(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None,
        kv_cache: Tensor, attn_metadata: Any, output: Tensor,
    ) -> Tensor:  # fmt: skip
        assert query.shape[1:] == output.shape[1:] == (self.sizes[0], self.sizes[2])
        found = self.attend(query, key, value, *self.views(kv_cache), attn_metadata.common)
        output[: len(found)] = found
        return output

    def views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, `[B, N, H, D]`."""
        return kv_cache[0], kv_cache[1]

    def attend(
        self, query: Tensor, key: Any, value: Any, keys: Tensor, values: Tensor, common: Any
    ) -> Tensor:
        starts, lens, size = (
            common.query_start_loc.tolist(), common.seq_lens.tolist(), keys.shape[1],
        )  # fmt: skip
        if key is not None and not self.shares:
            for token, slot in enumerate(common.slot_mapping.tolist()):
                if slot >= 0:
                    keys[slot // size, slot % size] = key[token]
                    values[slot // size, slot % size] = value[token]
        outputs = [query[:0]]
        for row in range(common.num_reqs):
            blocks = common.block_table_tensor[row, : -(-lens[row] // size)].long()
            k, v = (side[blocks].flatten(0, 1)[: lens[row]] for side in (keys, values))
            window = -1 if self.sliding_window is None else self.sliding_window - 1
            slopes = None if self.alibi_slopes is None else torch.tensor(self.alibi_slopes)
            cap = self.logits_soft_cap or 0.0
            q = query[starts[row] : starts[row + 1]]
            options = {"window": (window, -1), "softcap": cap, "slopes": slopes}
            if len(q):
                out = attention(q, k, v, scale=self.scale, causal=True, **options)[0]
                outputs.append(out.to(query.dtype))
        return torch.cat(outputs)


class FlatImpl(Impl):
    """As in vLLM v0: flat tensors, and a new output."""

    def forward(  # type: ignore[override]  # the argument list of v0
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Any,
    ) -> Tensor:  # fmt: skip
        heads, kv_heads, size = self.sizes
        assert query.shape[1:] == (heads * size,)
        new = (None if x is None else x.view(-1, kv_heads, size) for x in (key, value))
        query = query.view(-1, heads, size)
        found = self.attend(query, *new, *self.views(kv_cache), attn_metadata.common)
        return torch.cat([found, found.new_zeros(len(query) - len(found), heads, size)]).flatten(1)


class Backend(AttentionBackend):
    """Keys and values `(2, B, N, H, D)`."""

    impl: type[Impl] = Impl

    @staticmethod
    def get_name() -> str:
        return "STYLED"

    @classmethod
    def get_impl_cls(cls) -> Any:
        return cls.impl

    @staticmethod
    def get_builder_cls() -> Any:
        return PlanBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class FlatBackend(Backend):
    impl = FlatImpl


class BlocksFirst:
    """`(B, 2, H, N, D)`, and no class of attnlib as a base."""

    __name__ = "BlocksFirst"

    class Impl(Impl):
        def views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
            return kv_cache[:, 0].transpose(1, 2), kv_cache[:, 1].transpose(1, 2)

    get_name = staticmethod(lambda: "blocks_first")
    get_builder_cls = staticmethod(lambda: PlanBuilder)

    @classmethod
    def get_impl_cls(cls) -> Any:
        return cls.Impl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, 2, num_kv_heads, block_size, head_size)


class Packed(BlocksFirst):
    """`(2, B, N * H * D)`, which is no permutation."""

    class Impl(Impl):
        def views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
            heads, size = self.sizes[1:]
            return tuple(kv_cache[i].view(-1, BLOCK, heads, size) for i in range(2))

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size * num_kv_heads * head_size)


class SizedImpl(attnlib.AttentionImpl):
    """vLLM's constructor before `forward` of attnlib."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *more: Any,
        **extra_impl_args: Any,
    ) -> None:  # fmt: skip
        self.inner = Impl(num_heads, head_size, scale, num_kv_heads, *more)
        self.extra = extra_impl_args

    def forward(
        self, query: Tensor, cache: Any, metadata: Any, output: Tensor, lse: Any = None
    ) -> None:
        common = attnlib.CommonAttentionMetadata(
            query_start_loc=metadata.query_start_loc, seq_lens=metadata.seq_lens,
            num_reqs=metadata.num_reqs, num_actual_tokens=metadata.num_actual_tokens,
            max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len,
            block_table_tensor=metadata.block_table, slot_mapping=metadata.slot_mapping,
        )  # fmt: skip
        views = (cache.key_cache, cache.value_cache)
        output.copy_(self.inner.attend(query, None, None, *views, common))


class SizedBackend(AttentionBackend):
    get_name = staticmethod(lambda: "sized")
    get_impl_cls = staticmethod(lambda: SizedImpl)


def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values per head."""
    k, v = torch.randn(2, count, KV_HEADS, SIZE)
    return torch.randn(count, HEADS, SIZE), k, v


def common_of(query_lens: list[int], seq_lens: list[int]) -> attnlib.CommonAttentionMetadata:
    return attnlib.CommonAttentionMetadata.from_lengths(query_lens, seq_lens, TABLES, BLOCK, "cpu")
