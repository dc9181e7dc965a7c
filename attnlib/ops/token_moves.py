"""Move single tokens of a cache to other slots, on the device and without a synchronization."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import are_readable
from attnlib.ops.block_moves import as_bytes
from attnlib.ops.checks import check_writable

__all__ = ["move_tokens"]


def move_tokens(views: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """Copy tokens between slots of the same views. Every source is read before any is written.

    Args:
        views: all memory of the tokens, `[B, N, ...]` each.
        source: `[n]` int64 slots (P4) that are read.
        target: `[n]` int64 distinct slots that are written; -1 skips the pair.

    Raises:
        ContractError: other shapes, dtypes or devices; where values may be read, a slot outside of
            the cache or a target that occurs twice. Nothing is written.
    """
    blocks, size = views[0].shape[:2]
    for name, slots in (("source", source), ("target", target)):
        if not isinstance(slots, Tensor):
            raise ContractError(
                f"{name} slots are a {type(slots).__name__}; pass a tensor, int64 [n] on "
                f"{views[0].device}",
                rule="P4",
            )
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.device != views[0].device:
            raise ContractError(
                f"{name} slots are {slots.dtype} {tuple(slots.shape)} on {slots.device}; pass "
                f"int64 [n] on {views[0].device}",
                rule="P4",
            )
    if len(source) != len(target):
        raise ContractError(
            f"{len(source)} source slots and {len(target)} target slots: pass one target for each "
            "source, -1 for none",
            rule="P4",
        )
    if not len(source):
        return
    _check_values(source, target, blocks * size)
    for view in views:
        check_writable(blocks=view)
    # Pairs that are skipped repeat the first other pair, or copy slot 0 to itself.
    writes = target >= 0
    first = writes.int().argmax()
    pairs = torch.stack([source, target])
    pair = torch.where(writes[first], pairs[:, first], 0).unsqueeze(1)
    source, target = torch.where(writes, pairs, pair)
    taken = [as_bytes(view)[source // size, source % size] for view in views]
    for view, rows in zip(views, taken, strict=True):
        as_bytes(view)[target // size, target % size] = rows


def _check_values(source: Tensor, target: Tensor, num_slots: int) -> None:
    if not (are_readable(source) and are_readable(target)):
        return
    writes = target >= 0
    for name, slots in (("source", source), ("target", target)):
        outside = writes & ((slots < 0) | (slots >= num_slots))
        if outside.any():
            place = int(outside.int().argmax())
            raise ContractError(
                f"{name} slot {int(slots[place])} (index {place}) is outside the cache of "
                f"{num_slots} slots (0 to {num_slots - 1}; a target of -1 skips the pair)",
                rule="P4",
            )
    written, counts = torch.unique(target[writes], return_counts=True)
    if (counts > 1).any():
        slot = int(written[counts > 1][0])
        raise ContractError(
            f"target slot {slot} occurs more than once: the result would depend on the order of "
            "the copies",
            rule="P4",
        )
