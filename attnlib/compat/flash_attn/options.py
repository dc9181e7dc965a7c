"""The scalar arguments of FlashAttention's functions: which are served, which refused and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attnlib.compat.flash_attn.arguments import (
    FlashAttentionArgumentError,
    argument_errors,
    check_tensor,
    flag,
    integer,
    last_stride_1,
    number,
    refuse,
    refuse_gradients,
)
from attnlib.spec import AttentionSpec, AttentionType, MaskKind, Window

__all__ = [
    "FlashAttentionArgumentError",
    "Options",
    "argument_errors",
    "check_tensor",
    "integer",
    "last_stride_1",
    "refuse",
    "refuse_gradients",
    "slopes_of",
]


class Options(NamedTuple):
    """How one call computes scores; equal options need equal layers.

    Attributes:
        scale: softmax scale.
        causal: the causal mask, aligned bottom-right.
        window: visible keys (before, after) the query's own; -1 is unbounded.
        softcap: 0 is none.
        chunk: positions per attention chunk, 0 is none.
        alibi: whether ALiBi slopes are given.
        lse: whether the LSE is returned.
    """

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    chunk: int
    alibi: bool
    lse: bool

    @classmethod
    def of(
        cls,
        head_size: int,
        softmax_scale: float | None,
        causal: bool,
        window_size: Sequence[Any] | torch.Tensor,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
        return_lse: bool,
        *,
        max_query_len: int,
        max_seq_len: int,
        chunk: int = 0,
    ) -> Options:
        """The options of a call. Masks that hide the same keys become equal: a causal mask bounds
        the window on the right, a single query is the last position, and a side that reaches every
        key is unbounded.

        Raises:
            FlashAttentionArgumentError: `window_size` is not a pair, or a number is out of range.
        """
        is_pair = isinstance(window_size, Sequence | torch.Tensor)
        if not is_pair or getattr(window_size, "ndim", 1) != 1 or len(window_size) != 2:
            raise FlashAttentionArgumentError(
                f"window_size={window_size!r} must be a pair (left, right), with -1 for unbounded"
            )
        left, right = (max(integer("window_size", side), -1) for side in window_size)
        causal, return_lse = flag("causal", causal), flag("return_softmax_lse", return_lse)
        scale = head_size**-0.5 if softmax_scale is None else number("softmax_scale", softmax_scale)
        if left >= max_seq_len:
            left = -1
        if max_query_len == 1:
            causal = True
        if causal:
            right = 0
        elif right >= max_seq_len + max_query_len:  # the first queries may be before key 0
            right = -1
        cap = max(number("softcap", softcap), 0.0)
        has_alibi = alibi_slopes is not None
        chunk = integer("attention_chunk", chunk)
        return cls(scale, causal, (left, right), cap, chunk, has_alibi, return_lse)

    def spec(
        self,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_sizes: tuple[int, int],
        block_size: int | None,
    ) -> AttentionSpec:
        """What a layer with these options needs.

        Args:
            dtype: of q and the cache.
            num_heads, num_kv_heads: query and KV heads.
            head_sizes: elements of one key head and of one value head.
            block_size: tokens per block; None for keys that are not paged.
        """
        left, right = (None if side < 0 else side for side in self.window)
        window = sliding_window = None
        if self.causal:
            sliding_window = None if left is None else left + 1
        elif left is not None or right is not None:
            window = Window(left, right)
        return AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_sizes[0],
            head_size_v=head_sizes[1],
            dtype=dtype,
            block_size=block_size or 16,
            attn_type=AttentionType.DECODER if block_size else AttentionType.ENCODER_ONLY,
            mask_kind=MaskKind.CAUSAL if self.causal else MaskKind.BIDIRECTIONAL,
            sliding_window=sliding_window,
            window=window,
            logits_soft_cap=self.softcap or None,
            attention_chunk_size=self.chunk or None,
            has_alibi=self.alibi,
            needs_lse=self.lse,
        )


def slopes_of(
    alibi_slopes: torch.Tensor | None, like: torch.Tensor, requests: int
) -> torch.Tensor | None:
    """ALiBi slopes as `[1, Hq]` if they are equal for all requests, else `[requests, Hq]`.

    Args:
        alibi_slopes: `[Hq]` or `[requests, Hq]` float32.
        like: the query, `[..., Hq, D]`.
        requests: requests in the batch.

    Raises:
        FlashAttentionArgumentError: another shape, dtype or device.
    """
    if alibi_slopes is None:
        return None
    heads, dims = like.shape[-2], getattr(alibi_slopes, "ndim", 1)
    shape = f"[{heads}] or [{requests}, {heads}]"
    check_tensor("alibi_slopes", alibi_slopes, 2 if dims == 2 else 1, shape, like, torch.float32)
    if alibi_slopes.shape not in ((heads,), (requests, heads)):
        raise FlashAttentionArgumentError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}; it must be {shape}"
        )
    if dims == 2 and requests > 1 and alibi_slopes.stride(0) != 0:
        return alibi_slopes.contiguous()
    return (alibi_slopes if dims == 1 else alibi_slopes[0]).contiguous()[None]
