"""One random call: corrupted, refused or right, and no memory changed that it does not own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch

from attnlib.errors import AttnlibError
from tests.properties.corruptions.values import Change, change_of

UNDEFINED = object()
GUARD = 64
"""Elements before and after a cache that no call may change."""


class Meaningless(Exception):
    """Arguments that the reference gives no meaning: a call with them must be refused."""


class Outcome(NamedTuple):
    """How a call ended.

    Attributes:
        refused: the call raised an error that says why; otherwise it was right.
        corrupted: a value, length, shape or dtype of the call differs from the valid ones. Other
            strides alone are no corruption.
    """

    refused: bool
    corrupted: bool


class Undefined(Exception):
    """The rules allow several results: only memory outside of the call's own is compared."""


@dataclass
class Trial:
    """A call with valid arguments.

    Attributes:
        name: the operation.
        arguments: all of its arguments but the memory that it writes.
        memory: name -> values of a cache or another tensor that the call may write.
        call: makes the call with all arguments.
        reference: the result of the call; writes to the tensors of `memory` what the call must
            write. Raises `Meaningless`.
        others: exceptions with which the call may refuse, besides those of attnlib.
        same_result: compares two results.
        same_memory: compares the tensors that were written, by name; None for equal bits.
    """

    name: str
    arguments: dict[str, Any]
    memory: dict[str, torch.Tensor]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    others: tuple[type[Exception], ...] = ()
    same_result: Callable[[Any, Any], None] = field(default=lambda got, wanted: None)
    same_memory: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None] | None = None


class _Memory:
    """Tensors inside of larger allocations."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.allocations: dict[str, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            # A copy starts with equal guards, so that whole allocations can be compared.
            generator = torch.Generator().manual_seed(1)
            guard = torch.randint(0, 100, (2 * GUARD,), generator=generator)
            size = value.numel()
            allocation = torch.empty(size + 2 * GUARD, dtype=value.dtype)
            allocation[:GUARD], allocation[GUARD + size :] = guard[:GUARD], guard[GUARD:]
            view = allocation[GUARD : GUARD + size].view(value.shape)
            view.copy_(value)
            self.allocations[name], self.views[name] = allocation, view

    def guards(self) -> list[torch.Tensor]:
        return [_bytes(part) for x in self.allocations.values() for part in (x[:GUARD], x[-GUARD:])]


def check_trial(rng: Random, trial: Trial) -> Outcome:
    """Corrupt a trial and check it. A result that the rules leave open counts as right.

    Raises:
        AssertionError: another outcome; the message names the corruptions.
    """
    names = [*trial.arguments, *trial.memory]
    count = rng.choice([0, 1, 1, 1, 1, 2])
    changes: list[tuple[str, Change]] = []
    for name in rng.sample(names, min(count, len(names))):
        value = trial.arguments[name] if name in trial.arguments else trial.memory[name]
        changes.append((name, change_of(rng, value, is_memory=name in trial.memory)))
    ours, theirs = _Memory(trial.memory), _Memory(trial.memory)
    label = f"{trial.name} with " + (
        ", ".join(f"{name}: {change.text}" for name, change in changes) or "valid arguments"
    )
    given = _changed(trial, changes, ours)
    valid = {**trial.arguments, **ours.views}
    corrupted = any(not _equal(given[name], valid[name]) for name, _ in changes)
    try:
        result = trial.call(**given)
    except (AttnlibError, *trial.others) as error:
        assert changes, f"{label}: refused: {error}"
        assert len(str(error)) > 10, f"{label}: {error!r} says nothing"
        for name, allocation in ours.allocations.items():
            same = torch.equal(_bytes(allocation), _bytes(theirs.allocations[name]))
            assert same, f"{label}: refused, but {name} has changed ({error})"
        return Outcome(refused=True, corrupted=corrupted)
    except Exception as error:
        raise AssertionError(f"{label}: raised {type(error).__name__}: {error}") from error
    try:
        wanted = trial.reference(**_changed(trial, changes, theirs))
    except Undefined:
        wanted = UNDEFINED
    except Meaningless as error:
        raise AssertionError(f"{label}: accepted, but {error}") from None
    for mine, reference in zip(ours.guards(), theirs.guards(), strict=True):
        assert torch.equal(mine, reference), f"{label}: memory around a cache has changed"
    if wanted is UNDEFINED:
        return Outcome(refused=False, corrupted=corrupted)
    try:
        trial.same_result(result, wanted)
        if trial.same_memory is not None:
            trial.same_memory(ours.views, theirs.views)
        else:
            for name, view in ours.views.items():
                assert torch.equal(_bytes(view), _bytes(theirs.views[name])), f"{name} differs"
    except AssertionError as error:
        raise AssertionError(f"{label}: {error}") from None
    return Outcome(refused=False, corrupted=corrupted)


def _changed(trial: Trial, changes: list[tuple[str, Change]], memory: _Memory) -> dict[str, Any]:
    values = {**trial.arguments, **memory.views}
    for name, change in changes:
        values[name] = change.apply(values[name])
    return values


def _equal(given: Any, valid: Any) -> bool:
    """Whether two arguments have the same values, lengths, shapes and dtypes."""
    if isinstance(valid, torch.Tensor):
        alike = given.dtype == valid.dtype and given.shape == valid.shape
        return alike and torch.equal(_bytes(given), _bytes(valid))
    return repr(given) == repr(valid)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    packed = tensor.clone(memory_format=torch.contiguous_format)
    return packed.view(-1).view(torch.uint8)
