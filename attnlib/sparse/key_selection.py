"""Attention to selected keys (M11): what a layer declares, and the lists that a call passes.

Models with block-sparse or token-sparse attention compute, for each query, which keys it attends
to: DeepSeek V3.2 selects 2048 tokens for all heads, MiniMax-M3 and NSA select blocks of tokens for
each KV head. `KeySelection` is the part that never changes and belongs to the layer's spec.
`SelectedKeys` holds the lists, which differ from layer to layer and from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from attnlib.errors import ContractError

__all__ = ["KeySelection", "SelectedKeys", "SelectionScope"]


class SelectionScope(str, Enum):
    """Which query heads share a list."""

    ALL_HEADS = "all_heads"
    KV_HEAD = "kv_head"
    """One list for the query heads of each KV head."""
    QUERY_HEAD = "query_head"


@dataclass(frozen=True, kw_only=True)
class KeySelection:
    """The form of a layer's lists of selected keys.

    Attributes:
        max_blocks: largest number of entries in a list (K).
        block_size: tokens per selected block: entry e selects the positions
            [e * block_size, (e + 1) * block_size). Independent of the block size of the cache.
        scope: which query heads share a list, a `SelectionScope`.
        query_block_size: consecutive query tokens of a request that share a list.

    Raises:
        ContractError: a size below 1, or an unknown scope.
    """

    max_blocks: int
    block_size: int = 1
    scope: SelectionScope = SelectionScope.ALL_HEADS
    query_block_size: int = 1

    def __post_init__(self) -> None:
        for name in ("max_blocks", "block_size", "query_block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContractError(
                    f"{name}={value!r} of a key selection must be an integer of at least 1",
                    rule="M11",
                )
        try:
            object.__setattr__(self, "scope", SelectionScope(self.scope))
        except ValueError:
            names = ", ".join(scope.value for scope in SelectionScope)
            raise ContractError(
                f"scope={self.scope!r} of a key selection must be one of {names}", rule="M11"
            ) from None

    @classmethod
    def parse(cls, text: str) -> KeySelection:
        """The selection that `SCOPE:BLOCK_SIZE:MAX_BLOCKS` denotes, for command lines.

        Raises:
            ContractError: the text is not of this form.
        """
        parts = text.split(":")
        if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
            raise ContractError(
                f"{text!r} is not a key selection: write SCOPE:BLOCK_SIZE:MAX_BLOCKS, for example "
                "kv_head:128:16",
                rule="M11",
            )
        return cls(
            scope=parts[0],  # type: ignore[arg-type]  # __post_init__ converts the name
            block_size=int(parts[1]),
            max_blocks=int(parts[2]),
        )

    @property
    def max_keys(self) -> int:
        """The largest number of keys that a list selects."""
        return self.max_blocks * self.block_size

    def num_lists_heads(self, num_heads: int, num_kv_heads: int) -> int:
        """Lists per block of queries (H): 1, Hkv or Hq."""
        heads = {SelectionScope.ALL_HEADS: 1, SelectionScope.KV_HEAD: num_kv_heads}
        return heads.get(self.scope, num_heads)

    def __str__(self) -> str:
        """The fields in one line, for messages."""
        shared = f", query_block_size={self.query_block_size}" if self.query_block_size > 1 else ""
        return (
            f"{self.max_blocks} blocks of {self.block_size} tokens per {self.scope.value}{shared}"
        )


@dataclass(frozen=True, eq=False)
class SelectedKeys:
    """The lists of selected keys of one layer call (M11).

    Attributes:
        indices: `[L, H, K]` int32, the selected blocks of each list. H is 1, Hkv or Hq, as the
            scope says, and K is at most `max_blocks`. Negative entries are padding. Entries past
            the end of a request select nothing. The order has no meaning. Entries that select keys
            are distinct within a list. With query_block_size=1, L is at least T: list t belongs to
            query token t.
        list_start_loc: `[R + 1]` int32, with query_block_size > 1: the first list of each request.
            Query i of request r uses list `list_start_loc[r] + i // query_block_size`. None
            otherwise.
    """

    indices: torch.Tensor
    list_start_loc: torch.Tensor | None = None

    def __post_init__(self) -> None:
        starts = self.list_start_loc
        for name, x in (("indices", self.indices), ("list_start_loc", starts)):
            if not isinstance(x, torch.Tensor) and (x is not None or name == "indices"):
                raise ContractError(
                    f"{name} of the selected keys is a {type(x).__name__}; it must be an int32 "
                    "tensor",
                    rule="M11",
                )

    @property
    def signature(self) -> tuple[Any, ...]:
        """Dtypes, shapes, strides and devices of the tensors."""
        return tuple(
            None if x is None else (x.dtype, x.shape, x.stride(), x.device)
            for x in (self.indices, self.list_start_loc)
        )

    def check(
        self,
        selection: KeySelection,
        num_heads: int,
        num_kv_heads: int,
        num_reqs: int,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        """Check shapes, dtypes and devices; values are not read.

        Args:
            selection: the form of the lists.
            num_heads, num_kv_heads: Hq and Hkv.
            num_reqs: requests of the batch (R).
            num_tokens: query tokens of the batch, without padding.
            device: the device of the query.

        Raises:
            ContractError: the message names the tensor, what it is and what it must be.
        """
        self._check_indices(selection, selection.num_lists_heads(num_heads, num_kv_heads))
        self._check_starts(selection, num_reqs, num_tokens)
        for name, tensor in (("indices", self.indices), ("list_start_loc", self.list_start_loc)):
            if tensor is not None and tensor.device != device:
                raise ContractError(
                    f"{name} of the selected keys is on {tensor.device}, query on {device}: move "
                    "it to the device of the layer",
                    rule="M11",
                )

    def _check_indices(self, selection: KeySelection, heads: int) -> None:
        indices = self.indices
        if indices.dtype != torch.int32:
            raise ContractError(
                f"indices of the selected keys are {indices.dtype}; they must be torch.int32",
                rule="M11",
            )
        if (
            indices.dim() != 3
            or indices.shape[1] != heads
            or indices.shape[2] > selection.max_blocks
        ):
            raise ContractError(
                f"indices of the selected keys have shape {tuple(indices.shape)}; they must be "
                f"[lists, {heads}, at most {selection.max_blocks}] for a selection of {selection}",
                rule="M11",
            )
        if indices.shape[2] > 1 and indices.stride(2) != 1:
            raise ContractError(
                f"indices of the selected keys have last stride {indices.stride(2)}; it must be 1: "
                "call .contiguous()",
                rule="M11",
            )

    def _check_starts(self, selection: KeySelection, num_reqs: int, num_tokens: int) -> None:
        indices, starts = self.indices, self.list_start_loc
        shares = selection.query_block_size > 1
        if shares != (starts is not None):
            given = "missing" if starts is None else "given"
            raise ContractError(
                f"list_start_loc of the selected keys is {given}, but "
                f"query_block_size={selection.query_block_size}: it is needed exactly where "
                "several queries share a list",
                rule="M11",
            )
        if starts is None:
            if indices.shape[0] < num_tokens:
                raise ContractError(
                    f"indices of the selected keys have {indices.shape[0]} lists, but the batch "
                    f"has {num_tokens} tokens, one list each",
                    rule="M11",
                )
        elif starts.dtype != torch.int32 or starts.shape != (num_reqs + 1,):
            raise ContractError(
                f"list_start_loc of the selected keys is {starts.dtype} {tuple(starts.shape)}; it "
                f"must be torch.int32 [{num_reqs + 1}], one start per request and the end",
                rule="M11",
            )
        elif num_reqs and starts.stride(0) != 1:
            raise ContractError(
                f"list_start_loc of the selected keys has stride {starts.stride(0)}; call "
                ".contiguous()",
                rule="M11",
            )
