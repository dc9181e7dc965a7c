"""The arguments of `flash_attn_with_kvcache` as two objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from attnlib.compat.flash_attn.arguments import (
    last_stride_1,
)
from attnlib.compat.flash_attn.options import Options

__all__ = ["CallTensors", "ScoreArguments"]


class CallTensors(NamedTuple):
    """The tensors of a call; attributes as the arguments of `flash_attn_with_kvcache`.

    Attributes:
        table: the block table.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache_seqlens: int | torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    table: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None

    @property
    def num_requests(self) -> int:
        """Requests of the batch (B)."""
        starts = self.cu_seqlens_q
        return self.q.shape[0] if starts is None else starts.shape[0] - 1

    def with_last_stride_1(self) -> CallTensors:
        """Contiguous copies of q, k, v and the table where their last stride is not 1."""
        k, v, table = (
            None if x is None else last_stride_1(x) for x in (self.k, self.v, self.table)
        )
        return self._replace(q=last_stride_1(self.q), k=k, v=v, table=table)


class ScoreArguments(NamedTuple):
    """The arguments that decide how scores are computed, as those of `flash_attn_with_kvcache`."""

    softmax_scale: float | None
    causal: bool
    window_size: Sequence[int]
    softcap: float
    alibi_slopes: torch.Tensor | None
    attention_chunk: int
    return_softmax_lse: bool

    def options(self, tensors: CallTensors) -> Options:
        """The options of a call with these tensors."""
        table, starts = tensors.table, tensors.cu_seqlens_q
        return Options.of(
            tensors.q.shape[-1],
            self.softmax_scale,
            self.causal,
            self.window_size,
            self.softcap,
            self.alibi_slopes,
            self.return_softmax_lse,
            max_query_len=tensors.q.shape[1] if starts is None else int(tensors.max_seqlen_q or 0),
            max_seq_len=tensors.k_cache.shape[1] * (1 if table is None else table.shape[1]),
            chunk=self.attention_chunk,
        )
