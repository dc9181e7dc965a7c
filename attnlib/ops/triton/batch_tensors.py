"""The tensors of a batch and of its parts, which all layers of a step share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.hopper_tiles import is_long
from attnlib.ops.triton.hopper.sizes import LENGTH_STEP

__all__ = ["Batch", "BatchTensors"]


_SMALL_BLOCKS = 8
"""Tokens per block from which TMA reads them."""


class BatchPart(Protocol):
    """What the metadata of a backend tells of a part of its batch; see `PagedMetadata`."""

    @property
    def query_start_loc(self) -> Tensor: ...
    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def block_table(self) -> Tensor | None: ...
    @property
    def causal(self) -> bool | Tensor: ...
    @property
    def query_bias(self) -> Tensor | None: ...
    @property
    def score_tensors(self) -> Mapping[str, Tensor] | None: ...


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
        early: the kernel that is launched before a decode writes nothing but its queries, and
            lets it start only after all earlier kernels have ended. The decode may read keys, and
            the other tensors of the batch, while that kernel runs.
        uncombined: a decode may leave splits to the caller (`SplitStates`).
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
    early: bool = False
    uncombined: bool = False

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

    @classmethod
    def of_part(
        cls,
        part: BatchPart,
        workspace: Tensor | None,
        counters: Tensor | None,
        max_seq_len: int,
        max_query_len: int,
    ) -> BatchTensors:
        """The tensors of a part of a batch, or of the whole batch."""
        flags = part.causal if isinstance(part.causal, Tensor) else None
        score = tuple(part.score_tensors.values()) if part.score_tensors else ()
        return cls(
            part.query_start_loc,
            part.seq_lens,
            part.block_table,
            flags,
            part.query_bias,
            workspace,
            counters,
            max_seq_len,
            score,
            max_query_len,
        )

    @property
    def num_reqs(self) -> int:
        """R, requests of the batch."""
        return self.query_start_loc.shape[0] - 1

    @property
    def num_decodes(self) -> int:
        """R of a decode: packed caches have one query per request, and no `query_start_loc`."""
        return self.seq_lens.shape[0]

    def form(self) -> tuple[Any, ...]:
        """What a launch follows from in these tensors: dtypes, row counts and strides."""
        starts, lens, table, flags, bias, _, counters, _, score_tensors, _, *last = self
        return (  # one display: unpacking tuples into it would take as long as the rest
            starts.dtype,
            starts.shape,
            starts.stride(),
            lens.dtype,
            lens.shape,
            lens.stride(),
            None if table is None else (table.dtype, table.stride()),
            None if flags is None else (flags.dtype, flags.stride()),
            None if bias is None else (bias.dtype, bias.shape[1], bias.stride()),
            None if counters is None else (counters.dtype, counters.numel()),
            len(score_tensors),
            *last,
        )

    def length_class(self, cache: Tensor) -> int:
        """What the launches of a prefill follow from in the bound of the sequence lengths.

        How keys are divided over programs depends on the power of 2 below
        (`splits.prefill_splits`), other prefills on whether requests are long. Where a cache has
        elements of 8 bits or small blocks, its keys may be copied into scratch memory.
        """
        longest = self.max_seq_len
        power = (longest - 1).bit_length()
        if cache.element_size() == 1 or cache.shape[1] < _SMALL_BLOCKS:
            return -power if longest <= LENGTH_STEP else -(-longest // LENGTH_STEP)
        return 2 * power + int(is_long(longest))

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


class Batch(NamedTuple):
    """The tensors of a batch.

    Attributes:
        decodes: of the decode part; None for an empty part.
        prefills: of the prefill part; None for an empty part.
        slots: `[T]` int64, the slots of the new keys; None where nothing is written.
    """

    decodes: BatchTensors | None
    prefills: BatchTensors | None
    slots: Tensor | None

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of all tensors."""
        kept: list[Tensor | None] = [self.slots]
        for part in (self.decodes, self.prefills):
            if part is not None:
                kept += part[:7]  # the other fields are numbers
                kept += part.score_tensors
        return [x.untyped_storage() for x in kept if x is not None]
