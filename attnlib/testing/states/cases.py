"""The specs that the checks of state layers run, in sizes and dtypes of the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from attnlib.capabilities import Sizes
from attnlib.device import resolve_device
from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import CheckCase
from attnlib.testing.states.kinds import KINDS

__all__ = [
    "ROLLBACK",
    "Body",
    "adapted",
    "forms_of",
    "over_kinds",
    "recurrent_kinds",
    "case",
    "with_large_heads",
]

ROLLBACK = 3
"""Draft tokens of the cases with rollback."""

Body = Callable[[BackendUnderTest, StateSpec], str]
"""(backend, spec) -> error message or ""."""


def adapted(target: BackendUnderTest, spec: StateSpec) -> StateSpec:
    """The spec in a dtype and in head sizes of the backend; unchanged where it declares none."""
    caps, dtype = target.backend.state_capabilities, target.state_dtype
    spec = spec.replace(dtype=dtype)
    if not spec.has_recurrence or not isinstance(caps.key_sizes, Sizes):
        return spec
    if spec.key_size in caps.key_sizes and spec.value_size in (caps.value_sizes or ()):
        return spec
    size = next((n for n in (16, 32, 64, 128, 256) if n in caps.key_sizes), spec.key_size)
    return spec.replace(key_size=size, value_size=size)


def with_large_heads(target: BackendUnderTest, spec: StateSpec) -> StateSpec | None:
    """The spec in bfloat16 with heads as large as those of models, which may have other kernels;
    None where the backend does not take it, in a quick run, and on a CPU, which is too slow."""
    if target.quick or target.device.type == "cpu":
        return None
    values = 64 if spec.update == "add" else 128
    large = spec.replace(dtype=torch.bfloat16, key_size=128, value_size=values)
    return None if target.backend.state_reasons(large, resolve_device(target.device)) else large


def forms_of(target: BackendUnderTest, spec: StateSpec) -> list[str]:
    """The forms of the backend that fit a spec; only the preferred one in a quick run."""
    declared = target.backend.state_capabilities.forms or ()
    found = [form for form in declared if spec.fits(form)]
    return found[:1] if target.quick else found


def recurrent_kinds() -> list[str]:
    """The kinds that have a recurrence."""
    return [name for name, spec in KINDS.items() if spec.has_recurrence]


def over_kinds(
    target: BackendUnderTest,
    body: Body,
    *,
    names: Sequence[str] = tuple(KINDS),
    rollback: int = 0,
    **changes: object,
) -> Iterator[CheckCase]:
    """A case for each kind and form.

    Args:
        target: the backend under test.
        body: of each case.
        names: kinds.
        rollback: D.
        changes: further fields of the specs.
    """
    for name in names:
        spec = adapted(target, KINDS[name]).replace(max_rollback=rollback, **changes)
        for form in forms_of(target, spec) or ["none"]:
            chosen = spec if form == "none" else spec.replace(form=form)
            yield case(f"{name.replace(' ', '-')}-{form}", target, chosen, body)


def case(name: str, target: BackendUnderTest, spec: StateSpec, body: Body) -> CheckCase:
    """One case over a spec."""
    return CheckCase(name, lambda: body(target, spec), state_spec=spec)
