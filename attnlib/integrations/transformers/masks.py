"""The mask of one step: what transformers asked for, kept as a description and evaluated only where no kernel argument says it.

`attnlib_mask` is what transformers calls once per step and layer type. It reads nothing from the device and makes no `[T, S]` tensor. Its result
travels through the model to the attention function as a tensor that carries a `StepMask`; everything derived from the mask (lengths, tables,
backend metadata) is kept in that object, so it is made once per step, shared by the layers, and gone with the step.

A tensor can lose its attributes (a move to another device makes a new one). A mask that padding and the layer's own arguments describe in full is
therefore a bool `[B, keys]` tensor that remains right without them; any other is a `uint8` placeholder that `read_mask` refuses when bare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attnlib.errors import ContractError
from attnlib.integrations.transformers.patterns import MaskFunction, Pattern, recognise
from attnlib.spec import Window

__all__ = ["Rows", "StepMask", "attnlib_mask", "read_mask"]

_ATTRIBUTE = "attnlib_mask"


@dataclass(frozen=True, eq=False)
class Rows:
    """Which keys and queries of a padded batch are real, on the host.

    Attributes:
        keys: [B, width] bool; columns of the mask that are tokens.
        real: [B, T] bool; queries that are tokens (the last T columns).
        trailing: [B, T] bool; padding queries behind the last token of their row: they see the whole row.
        contiguous: every row's tokens stand side by side, so distances in columns are distances in tokens.
        interleaved: some padding query stands between tokens: no request of tokens can serve it.
    """

    keys: np.ndarray
    real: np.ndarray
    trailing: np.ndarray
    contiguous: bool
    interleaved: bool

    @classmethod
    def read(cls, padding: torch.Tensor, num_queries: int) -> Rows | None:
        """The rows of a `[B, width]` bool mask (one host sync); None when nothing is padding."""
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
        behind = ~real & (seen > 0)
        trailing = behind & (seen == counts)
        return cls(keys, real, trailing, contiguous, bool((behind & ~trailing).any()))


@dataclass(eq=False)
class StepMask:
    """The mask of one step and layer type.

    Attributes:
        pattern: what kernels are told; None where only the evaluated mask says it.
        batch_size, q_length, kv_length: B, T, S as the attention function will see them.
        q_offset: tokens that precede the step's first query, in the numbering of `attention_mask`.
        kv_offset: where in that numbering the keys begin (a sliding cache has dropped what is before).
        mask_function: transformers' description.
        attention_mask: [B, tokens] bool, True for tokens; None when nothing is padding.
        device: where the mask is needed.
        use_vmap: how transformers wants `mask_function` evaluated.
        plans: what the layers of this step have derived from the mask.
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
    plans: dict[Any, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Keys that exist. A static cache is longer: what lies behind the step's last query is not written yet."""
        if self.pattern is None or not self.pattern.causal:
            return self.kv_length
        return min(self.kv_length, self.q_offset + self.q_length - self.kv_offset)

    def padding(self) -> torch.Tensor | None:
        """[B, width] bool, True for tokens; None when there is no padding."""
        if self.attention_mask is None:
            return None
        mask, end = self.attention_mask, self.kv_offset + self.width
        if mask.shape[-1] == self.width < end:
            return mask  # one of ours, cut already, whose description was lost
        if mask.shape[-1] < end:
            mask = torch.nn.functional.pad(mask, (0, end - mask.shape[-1]))
        return mask[:, self.kv_offset : end]

    def rows(self) -> Rows | None:
        """`Rows` of the padding, read once; None when nothing is padding."""
        if "rows" not in self.plans:
            padding = self.padding()
            self.plans["rows"] = None if padding is None else Rows.read(padding, self.q_length)
        rows: Rows | None = self.plans["rows"]
        return rows

    def dense(self) -> torch.Tensor:
        """The evaluated mask, [B, 1, T, S] bool, True where visible; made once."""
        if "dense" not in self.plans:
            self.plans["dense"] = self._evaluated()
        dense: torch.Tensor = self.plans["dense"]
        return dense

    def check(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Refuse a mask that was made for other tensors.

        Raises:
            ContractError: batch, queries or keys differ from what transformers announced for this step.
        """
        announced = (self.batch_size, self.q_length, self.kv_length)
        found = (query.shape[0], query.shape[2], key.shape[2])
        if found != announced:
            raise ContractError(
                f"attention got (batch, queries, keys)={found}, its mask was made for {announced}: the mask belongs to another layer type or step; "
                f"pass this layer's own mask, or run this model with attn_implementation='sdpa'"
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
        assert mask is not None  # both skips are off
        return mask

    def _evaluated_pattern(self) -> torch.Tensor:
        """The mask of a module that let transformers describe none: causal or not, its window, and padding."""
        assert (
            self.pattern is not None and self.pattern.chunk is None
        )  # a description is missing only there
        query = (
            torch.arange(self.q_length, device=self.device)[:, None]
            + self.q_offset
            - self.kv_offset
        )
        distance = torch.arange(self.kv_length, device=self.device) - query
        left, right = self.pattern.window
        visible = torch.ones_like(distance, dtype=torch.bool) if left is None else distance >= -left
        visible = visible if right is None else visible & (distance <= right)
        keys, padding = (
            torch.ones(self.batch_size, self.kv_length, dtype=torch.bool, device=self.device),
            self.padding(),
        )
        keys[:, self.width :] = False
        if padding is not None:
            keys[:, : self.width] = padding
        if self.pattern.segments is not None:
            segments = self.pattern.segments.to(self.device)
            visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
        return visible & keys[:, None, None, :]


def attnlib_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """The mask function registered with transformers: a small tensor that carries a `StepMask`.

    Args:
        batch_size, q_length, kv_length: B, T, S.
        q_offset, kv_offset: where queries and keys begin in the numbering of `attention_mask`.
        mask_function: transformers' description; None means causal.
        attention_mask: `[B, tokens]` bool padding mask or None.
        use_vmap, device: how and where to evaluate `mask_function`, should that be needed.

    Returns:
        bool `[B, width]`, or a uint8 `[1, 1, 1, 1]` placeholder where a padding mask would not say enough.
    """
    if attention_mask is not None and getattr(attention_mask, _ATTRIBUTE, None) is not None:
        return attention_mask  # transformers prepares masks for compiled forwards ahead and hands them in again
    pattern = Pattern(True, Window(None, 0)) if mask_function is None else recognise(mask_function)
    offset = int(
        q_offset
    )  # a static cache counts in a tensor that its update will have changed when the layers look
    step = StepMask(
        pattern,
        batch_size,
        q_length,
        kv_length,
        offset,
        kv_offset,
        mask_function,
        attention_mask,
        device,
        use_vmap,
    )
    padding = step.padding()
    if pattern is None or not pattern.is_plain:
        carrier = torch.zeros(1, 1, 1, 1, dtype=torch.uint8, device=device)
    elif padding is None:
        carrier = torch.ones(batch_size, step.width, dtype=torch.bool, device=device)
    else:
        carrier = padding.contiguous().view(
            padding.shape
        )  # transformers makes a contiguous copy of any other
    setattr(carrier, _ATTRIBUTE, step)
    return carrier


def read_mask(mask: torch.Tensor | None) -> StepMask | None:
    """The `StepMask` that a tensor carries; None for None and for a mask that somebody else made.

    Raises:
        ContractError: a placeholder whose description was lost on the way.
    """
    step: StepMask | None = getattr(mask, _ATTRIBUTE, None)
    if step is None and mask is not None and mask.dtype == torch.uint8:
        raise ContractError(
            "the description of this attention mask was lost between mask and layer (a copy or a move to another device drops it), and padding "
            "alone does not say it: keep the model on one device, or run it with attn_implementation='sdpa'"
        )
    return step
