"""The batch of a step of a `PagedModel`, or those of its groups over one pool."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnlib.cache.hybrid import Group, StateGroup
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.groups import GroupBatch, StateGroupBatch

__all__ = ["StepBatch", "check_tokens", "one_batch"]

_INDICES = (torch.int64, torch.int32)
StepBatch = CommonAttentionMetadata | Mapping[str, GroupBatch]
"""The batch of a step; for a hybrid model one for each group, as `group_batches` makes them."""


def one_batch(batch: StepBatch, groups: Mapping[str, Group] | None) -> CommonAttentionMetadata:
    """A batch with the lengths of a step.

    Args:
        batch: of the step.
        groups: of a hybrid model, or None.

    Raises:
        ContractError: a hybrid model and a single batch, a group without its batches, or batches of
            different requests.
    """
    if isinstance(batch, CommonAttentionMetadata):
        if groups is None:
            return batch
        names: set[str] = set()
    elif not isinstance(batch, Mapping):
        raise ContractError(
            f"batch is a {type(batch).__name__}; it must be a CommonAttentionMetadata, or for a "
            "hybrid model what group_batches returns"
        )
    else:
        names = set(batch)
        if groups is not None and names == set(groups):
            return _with_equal_sizes(
                {name: _first_of(name, batch[name], group) for name, group in groups.items()}
            )
    needs = "is not hybrid" if groups is None else "needs " + ", ".join(groups)
    raise ContractError(
        f"the step has batches for {', '.join(sorted(names)) or 'no group'}, the model {needs}: "
        f"pass {'a single batch' if groups is None else 'one batch per group'}"
    )


def _with_equal_sizes(batches: Mapping[str, CommonAttentionMetadata]) -> CommonAttentionMetadata:
    """The first of the batches, which have the same requests and tokens."""
    sizes = {name: (one.num_reqs, one.num_actual_tokens) for name, one in batches.items()}
    (first, one), *_ = batches.items()
    for name, size in sizes.items():
        if size != sizes[first]:
            raise ContractError(
                f"the batch of group {name} has {size[0]} requests with {size[1]} tokens, that of "
                f"{first} {sizes[first][0]} with {sizes[first][1]}: make them by one call of "
                "group_batches"
            )
    return one


def check_tokens(
    batch: CommonAttentionMetadata,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """Whether the tensors of a step are those of its batch.

    Args:
        batch: of the step.
        input_ids, position_ids, rows: as in `PagedModel.step`. Only rows on the CPU are read.

    Raises:
        ContractError: there is no token, something is not a tensor or one of another length or
            dtype, or a row has no token.
    """
    given = {"input_ids": input_ids, "position_ids": position_ids, "rows": rows}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor) and not (name == "rows" and tensor is None):
            kind = type(tensor).__name__
            raise ContractError(f"{name} is of type {kind}; it must be a tensor of indices, int64")
        if tensor is not None and tensor.dtype not in _INDICES:
            raise ContractError(f"{name} is {tensor.dtype}; it must hold indices: convert to int64")
    count = input_ids.numel()
    if input_ids.dim() != 1 or count < max(batch.num_actual_tokens, 1):
        raise ContractError(
            f"input_ids has shape {list(input_ids.shape)}, and the batch has "
            f"{batch.num_actual_tokens} tokens: pass each of them, and skip a step without tokens"
        )
    if position_ids.shape != input_ids.shape:
        raise ContractError(
            f"position_ids has shape {list(position_ids.shape)}; it must be [{count}], a position "
            "for each of input_ids"
        )
    if rows is not None and rows.dim() != 1:
        raise ContractError(f"rows has shape {list(rows.shape)}; it must be [n], a token each")
    if rows is None or not rows.is_cpu or not rows.numel():
        return
    first, last = int(rows.min()), int(rows.max())
    if first < -count or last >= count:
        raise ContractError(
            f"rows has {last if last >= count else first}, and the step has {count} tokens: pass "
            f"indices from {-count} to {count - 1}"
        )


def _first_of(name: str, batch: GroupBatch, group: Group) -> CommonAttentionMetadata:
    """The batch of a group; of states that of the first layer."""
    layers = group.num_layers if isinstance(group, StateGroup) else None
    given = len(batch.slots) if isinstance(batch, StateGroupBatch) else None
    if layers != given:
        raise ContractError(
            f"group {name} needs {_slots(layers)}, and its batch has {_slots(given)}: use "
            "group_batches",
            rule="T15",
        )
    return batch.batch if isinstance(batch, StateGroupBatch) else batch


def _slots(layers: int | None) -> str:
    return "a block table" if layers is None else f"slots of {layers} state layers"
