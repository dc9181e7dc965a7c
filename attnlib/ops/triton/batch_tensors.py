"""The tensors of a batch, which all layers of a step share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams

__all__ = ["BatchTensors"]


class BatchTensors(NamedTuple):
    """The tensors of a batch that an attention launch reads, and the bounds of its lengths.

    Attributes:
        query_start_loc: `[R + 1]` int32, where each request's query tokens start.
        seq_lens: `[R]` int32, keys of each request; without a block table `[R + 1]`, where each
            request's keys start.
        block_table: `[R, M]` int32, the pages of each request; None for packed keys.
        causal_flags: `[R]` bool; None when one flag holds for all requests.
        query_bias: `[T, >= max_query_len]` float32 or None.
        workspace: scratch memory, float32 or uint8; None when nothing is split.
        counters: int32 zeros; None when no kernel needs them.
        max_seq_len: upper bound of the sequence lengths, in tokens.
        score_tensors: batch tensors of the score function, in its order.
        max_query_len: upper bound of the query lengths, in tokens.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor | None
    causal_flags: Tensor | None = None
    query_bias: Tensor | None = None
    workspace: Tensor | None = None
    counters: Tensor | None = None
    max_seq_len: int = 0
    score_tensors: tuple[Tensor, ...] = ()
    max_query_len: int = 0

    @classmethod
    def of(
        cls,
        params: AttentionParams,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor | None,
        *,
        max_query_len: int,
        max_seq_len: int = 0,
        workspace: Tensor | None = None,
        counters: Tensor | None = None,
    ) -> BatchTensors:
        """The batch of a call made without metadata: flags, bias and score tensors are those of the
        parameters.

        Args:
            params: of the call.
            query_start_loc, seq_lens, block_table: of the batch.
            max_query_len, max_seq_len: the bounds of its lengths.
            workspace, counters: scratch memory, or None.
        """
        return cls(
            query_start_loc,
            seq_lens,
            block_table,
            params.causal if isinstance(params.causal, Tensor) else None,
            params.query_bias,
            workspace,
            counters,
            max_seq_len,
            params.batch_score_tensors(),
            max_query_len,
        )

    @property
    def num_reqs(self) -> int:
        """R, requests of the batch."""
        return self.query_start_loc.shape[0] - 1

    def check(self) -> None:
        """Refuse tensors that the kernels would misread: they index them as dense int32.

        Raises:
            ContractError: the message names the tensor, its dtype or stride, and the required one.
        """
        for name in ("query_start_loc", "seq_lens"):
            tensor = getattr(self, name)
            if tensor.dim() != 1 or (tensor.shape[0] > 1 and tensor.stride(0) != 1):
                raise ContractError(
                    f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it "
                    "must be one-dimensional and contiguous: call .contiguous()",
                    rule="M1",
                )
        if self.counters is not None and self.counters.dtype != torch.int32:
            raise ContractError(
                f"counters are {self.counters.dtype} and must be torch.int32 zeros; create them "
                "with torch.zeros(n, dtype=torch.int32)"
            )
        table = self.block_table
        # PyTorch calls every tensor without elements contiguous, whatever its strides.
        if table is not None and table.shape[0] and table.shape[1] > 1 and table.stride(1) != 1:
            raise ContractError(
                f"block_table has last stride {table.stride(1)}; it must be 1: call .contiguous()",
                rule="P3",
            )
        self._check_flags()
        self._check_bias()

    def _check_flags(self) -> None:
        flags = self.causal_flags
        if flags is None:
            return
        if flags.dtype not in (torch.bool, torch.uint8):
            raise ContractError(f"causal flags are {flags.dtype}; convert them to torch.bool")
        if flags.shape[0] > 1 and flags.stride(0) != 1:
            raise ContractError(
                f"causal flags have stride {flags.stride(0)}; it must be 1: call .contiguous()"
            )

    def _check_bias(self) -> None:
        bias = self.query_bias
        if bias is None:
            return
        if bias.stride(1) != 1 and bias.shape[1] > 1:
            raise ContractError(
                f"query_bias has last stride {bias.stride(1)}; make its last dimension dense"
            )
        if bias.shape[1] < self.max_query_len:
            raise ContractError(
                f"query_bias has {bias.shape[1]} columns; it needs one for each of the "
                f"max_query_len={self.max_query_len} keys of the query span"
            )
