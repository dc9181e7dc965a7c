"""The description of the mask of one step, and what layers derive from it.

`StepMask` holds what transformers describes: sizes, offsets, padding and a recognized pattern.
`Rows` is its padding on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch

from attnlib.errors import ContractError
from attnlib.integrations.transformers.patterns import MaskFunction, Pattern

if TYPE_CHECKING:
    from attnlib.integrations.transformers.call_again import CallAgain

__all__ = ["Rows", "StepMask", "first_visible_key"]


@dataclass(frozen=True, eq=False)
class Rows:
    """The tokens of a padded batch, on the host.

    Attributes:
        keys: `[B, width]` bool; columns of the mask that are tokens.
        real: `[B, T]` bool; queries (the last T columns) that are tokens.
        trailing: `[B, T]` bool; padding queries after the last token of their row. They see the
            whole row.
        contiguous: no row has padding between its tokens, so a distance in columns is a distance
            in tokens.
        interleaved: some padding query is between tokens. No request of tokens represents it.
    """

    keys: np.ndarray
    real: np.ndarray
    trailing: np.ndarray
    contiguous: bool
    interleaved: bool

    @classmethod
    def read(cls, padding: torch.Tensor, num_queries: int) -> Rows | None:
        """The rows of a `[B, width]` bool mask, or None without padding. Synchronizes."""
        keys = padding.cpu().numpy()
        return None if keys.all() else cls.of(keys, num_queries)

    @classmethod
    def of(cls, keys: np.ndarray, num_queries: int) -> Rows:
        """The rows of a `[B, width]` bool mask on the host."""
        counts = keys.sum(1, keepdims=True)
        seen = keys.cumsum(1)
        contiguous = bool((((seen > 0) & (seen < counts)) <= keys).all())
        queries = slice(max(0, keys.shape[1] - num_queries), None)
        real, seen = keys[:, queries], seen[:, queries]
        after_first = ~real & (seen > 0)
        trailing = after_first & (seen == counts)
        return cls(keys, real, trailing, contiguous, bool((after_first & ~trailing).any()))


@dataclass(eq=False)
class StepMask:
    """The mask of one step and layer type.

    Attributes:
        pattern: the mask as kernel arguments; None if only the evaluated mask expresses it.
        batch_size, q_length, kv_length: B, T and S of the attention call.
        q_offset: position of the first query in `attention_mask`.
        kv_offset: position of the first key in `attention_mask`; positive once a sliding cache has
            dropped keys.
        mask_function: the description by transformers.
        attention_mask: `[B, tokens]` bool, True for tokens; None without padding.
        device: device of the model's input.
        use_vmap: how transformers evaluates `mask_function`.
        is_reused: other steps use this description too, so nothing that may change between steps is
            kept in `plans`.
        is_static: the keys are all of a static cache, so the next step has tensors of these sizes.
        plans: cache of everything that the layers of this step derive from the mask.
        number: of this object, which no other has.
        described: the evaluated mask if it is a plain tensor, which holds this description.
        again: what a layer of the step has found on a CPU (`call_again`).
    """

    pattern: Pattern | None
    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int = 0
    kv_offset: int = 0
    mask_function: MaskFunction | None = None
    attention_mask: torch.Tensor | None = None
    device: torch.device | str = "cpu"
    use_vmap: bool = False
    is_reused: bool = False
    is_static: bool = False
    plans: dict[Any, Any] = field(default_factory=dict)
    number: int = field(default_factory=count(1).__next__, init=False)
    described: ref[torch.Tensor] | None = field(default=None, init=False)
    again: CallAgain | None = field(default=None, init=False)

    @property
    def width(self) -> int:
        """Number of keys that exist. A static cache has further keys that are not written yet."""
        if self.pattern is None or not self.pattern.causal:
            return self.kv_length
        return min(self.kv_length, self.q_offset + self.q_length - self.kv_offset)

    def padding(self) -> torch.Tensor | None:
        """`[B, width]` bool, True for tokens; None without padding."""
        if self.attention_mask is None:
            return None
        mask, end = self.attention_mask, self.kv_offset + self.width
        if mask.shape[-1] == end and self.kv_offset == 0:
            return mask
        if mask.shape[-1] < end:
            mask = torch.nn.functional.pad(mask, (0, end - mask.shape[-1]))
        return mask[:, self.kv_offset : end]

    def rows(self) -> Rows | None:
        """The rows of the batch, read once per step; None without padding."""
        if "rows" not in self.plans:
            padding = self.padding()
            self.plans["rows"] = None if padding is None else Rows.read(padding, self.q_length)
        rows: Rows | None = self.plans["rows"]
        return rows

    def dense(self) -> torch.Tensor:
        """The evaluated mask, `[B, 1, T, S]` bool, True where visible; computed once."""
        described = None if self.described is None else self.described()
        if described is not None:
            return described
        if "dense" not in self.plans:
            self.plans["dense"] = self._evaluated()
        dense: torch.Tensor = self.plans["dense"]
        return dense

    def check(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Check that the mask was made for these tensors.

        Args:
            query: `[B, Hq, T, D]`.
            key: `[B, Hkv, S, D]`.

        Raises:
            ContractError: B, T or S differ from the sizes that transformers announced, or query and
                key differ in their dtype.
        """
        if query.dtype != key.dtype:
            raise ContractError(
                f"the query is {query.dtype}, the keys are {key.dtype}: make the cache again, or "
                f"convert it, if the dtype of the model has changed since it was filled"
            )
        announced = (self.batch_size, self.q_length, self.kv_length)
        found = (query.shape[0], query.shape[2], key.shape[2])
        if found != announced:
            raise ContractError(
                f"attention got (batch, queries, keys)={found}, its mask was made for {announced}: "
                f"the mask belongs to another layer type or step; pass the mask of this layer, or "
                f"run this model with attn_implementation='eager'"
            )

    def _evaluated(self) -> torch.Tensor:
        if self.mask_function is None:
            return self._evaluated_pattern()
        from transformers.masking_utils import sdpa_mask

        mask: torch.Tensor | None = sdpa_mask(
            batch_size=self.batch_size,
            q_length=self.q_length,
            kv_length=self.kv_length,
            q_offset=self.q_offset,
            kv_offset=self.kv_offset,
            mask_function=self.mask_function,
            attention_mask=self.attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )
        assert mask is not None  # sdpa_mask returns None only if a skip is allowed
        return mask

    def _evaluated_pattern(self) -> torch.Tensor:
        """The mask of a module for which transformers describes none."""
        # Chunks always come with a description by transformers.
        assert self.pattern is not None and self.pattern.chunk is None
        query = (
            torch.arange(self.q_length, device=self.device)[:, None]
            + self.q_offset
            - self.kv_offset
        )
        distance = torch.arange(self.kv_length, device=self.device) - query
        left, right = self.pattern.window
        visible = torch.ones_like(distance, dtype=torch.bool) if left is None else distance >= -left
        visible = visible if right is None else visible & (distance <= right)
        keys = torch.ones(self.batch_size, self.kv_length, dtype=torch.bool, device=self.device)
        padding = self.padding()
        keys[:, self.width :] = False
        if padding is not None:
            keys[:, : self.width] = padding
        if self.pattern.segments is not None:
            segments = self.pattern.segments.to(self.device)
            visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
        return visible & keys[:, None, None, :]


def first_visible_key(
    step: StepMask, pattern: Pattern, padding: torch.Tensor | None
) -> int | torch.Tensor:
    """The first key that the window and the chunk of a single query leave visible.

    Args:
        step: the mask, with one query per row.
        pattern: its pattern.
        padding: `[B, tokens]` bool as in `StepMask.attention_mask`, or None.

    Returns:
        Index among the cached keys, for all rows or `[B]`; it may be negative.
    """
    first = 0 if pattern.window.left is None else step.width - 1 - pattern.window.left
    if pattern.chunk is None:
        return first
    # Chunks are counted from the first token of the row, after the padding on the left.
    left = 0 if padding is None else (padding.cumsum(1) == 0).sum(1)
    start = (step.q_offset - left) // pattern.chunk * pattern.chunk + left - step.kv_offset
    return max(start, first) if isinstance(start, int) else start.clamp(min=first)
