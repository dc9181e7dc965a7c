"""The batch of a step of a `PagedModel`, or those of its groups over one pool."""

from __future__ import annotations

from collections.abc import Mapping

from attnlib.cache.hybrid import Group, StateGroup
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.groups import GroupBatch, StateGroupBatch

__all__ = ["StepBatch", "one_batch"]

StepBatch = CommonAttentionMetadata | Mapping[str, GroupBatch]
"""The batch of a step; for a hybrid model one for each group, as `group_batches` makes them."""


def one_batch(batch: StepBatch, groups: Mapping[str, Group] | None) -> CommonAttentionMetadata:
    """A batch with the lengths of a step.

    Args:
        batch: of the step.
        groups: of a hybrid model, or None.

    Raises:
        ContractError: a hybrid model and a single batch, or a group without its batches.
    """
    if isinstance(batch, CommonAttentionMetadata):
        if groups is None:
            return batch
        names: set[str] = set()
    else:
        names = set(batch)
        if groups is not None and names == set(groups):
            return [_first_of(name, batch[name], group) for name, group in groups.items()][0]
    needs = "is not hybrid" if groups is None else "needs " + ", ".join(groups)
    raise ContractError(
        f"the step has batches for {', '.join(sorted(names)) or 'no group'}, the model {needs}: "
        f"pass {'a single batch' if groups is None else 'one batch per group'}"
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
