"""R2: operations refuse arguments that do not fit before they write anything.

Each case calls an operation with one argument that breaks a rule. The operation must raise
`ContractError`, and the cache must keep its bytes. Cases are unsupported where a backend has no
such operation (`AttentionBackend.get_operation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.ops.rotary import HeadNorm
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.operation_calls import operation_case
from attnlib.testing.runner import find_operation

__all__ = ["CHECKS"]

_Changes = dict[str, Any]


def _packed_write(device: torch.device, changes: _Changes) -> _Changes:
    """Arguments of `packed_write`: two heads of 32 elements, blocks of 8 positions."""
    arguments: _Changes = {
        "key": torch.ones(4, 2, 32, device=device),
        "value": torch.ones(4, 2, 32, device=device),
        "key_cache": torch.zeros(3, 2, 8, 8, 4, device=device),
        "value_cache": torch.zeros(3, 2, 32, 8, device=device),
        "slot_mapping": torch.tensor([1, 9, -1, 20], device=device),
    }
    return arguments | {name: change(arguments.get(name)) for name, change in changes.items()}


def _packed_latents(device: torch.device, changes: _Changes) -> _Changes:
    """Arguments of `write_packed_latents`."""
    arguments: _Changes = {
        "latents": torch.ones(4, 576, device=device),
        "data": torch.zeros(3, 8, 656, dtype=torch.uint8, device=device),
        "slot_mapping": torch.tensor([1, 9, -1, 20], device=device),
    }
    return arguments | {name: change(arguments.get(name)) for name, change in changes.items()}


def _rotate_latents(device: torch.device, changes: _Changes) -> _Changes:
    """Arguments of `rotate_and_write` over a cache of latents (P10)."""
    arguments = _rotate_and_write(device, changes)
    latents = torch.zeros(3, 8, 1, 32, device=device)
    heads = {name: torch.ones(4, 1, 32, device=device) for name in ("query", "key")}
    angles = {name: torch.ones(4, 8, device=device) for name in ("cos", "sin")}
    value = heads["key"][..., :16]
    return {
        **arguments,
        **heads,
        "value": value,
        "key_cache": latents,
        "value_cache": latents[..., :16],
        **angles,
    }


def _rotate_and_write(device: torch.device, changes: _Changes) -> _Changes:
    """Arguments of `rotate_and_write`: two KV heads of 16 elements, blocks of 8 positions."""
    arguments: _Changes = {
        "query": torch.ones(4, 4, 16, device=device),
        "key": torch.ones(4, 2, 16, device=device),
        "value": torch.ones(4, 2, 16, device=device),
        "key_cache": torch.zeros(3, 8, 2, 16, device=device),
        "value_cache": torch.zeros(3, 8, 2, 16, device=device),
        "slot_mapping": torch.tensor([1, 9, -1, 20], device=device),
        "cos": torch.ones(4, 8, device=device),
        "sin": torch.zeros(4, 8, device=device),
    }
    return arguments | {name: change(arguments.get(name)) for name, change in changes.items()}


def _rotate(device: torch.device, changes: _Changes) -> _Changes:
    """Arguments of `rotate`: heads of 16 elements."""
    arguments: _Changes = {
        "heads": torch.ones(4, 2, 16, device=device),
        "cos": torch.ones(4, 8, device=device),
        "sin": torch.zeros(4, 8, device=device),
    }
    return arguments | {name: change(arguments.get(name)) for name, change in changes.items()}


_WRITES: dict[str, tuple[Callable[[torch.device, _Changes], _Changes], _Changes]] = {
    "packed_write-int32-slots": (_packed_write, {"slot_mapping": torch.Tensor.int}),
    "packed_write-two-dimensions": (_packed_write, {"slot_mapping": lambda x: x[None]}),
    "packed_write-few-keys": (_packed_write, {"key": lambda x: x[:3]}),
    "packed_write-few-values": (_packed_write, {"value": lambda x: x[:3]}),
    "packed_write-k_scale-0": (_packed_write, {"k_scale": lambda _: 0.0}),
    "packed_write-k_scale-nan": (_packed_write, {"k_scale": lambda _: torch.nan}),
    "packed_write-v_scale-0": (_packed_write, {"v_scale": lambda _: 0.0}),
    "packed_write-v_scale-inf": (_packed_write, {"v_scale": lambda _: torch.inf}),
    "rotate-few-angles": (_rotate, {"cos": lambda x: x[:3]}),
    "rotate-wide-angles": (
        _rotate,
        {"cos": lambda x: x.repeat(1, 2), "sin": lambda x: x.repeat(1, 2)},
    ),
    "rotate-no-sine": (_rotate, {"sin": lambda _: None}),
    "rotate-norm-of-8": (_rotate, {"norm": lambda _: HeadNorm(torch.ones(8))}),
    "rotate_and_write-few-angles": (_rotate_and_write, {"cos": lambda x: x[:3]}),
    "rotate_and_write-wide-angles": (
        _rotate_and_write,
        {"cos": lambda x: x.repeat(1, 2), "sin": lambda x: x.repeat(1, 2)},
    ),
    "rotate_and_write-more-keys-than-angles": (
        _rotate_and_write,
        {"key": lambda x: x.repeat(2, 1, 1), "value": lambda x: x.repeat(2, 1, 1)},
    ),
    "rotate_and_write-no-sine": (_rotate_and_write, {"sin": lambda _: None}),
    "rotate_and_write-latents": (_rotate_latents, {}),
    "rotate_and_write-key-heads": (_rotate_and_write, {"key": lambda x: x[:, :1]}),
    "rotate_and_write-value-heads": (_rotate_and_write, {"value": lambda x: x[:, :1]}),
    "rotate_and_write-int32-slots": (_rotate_and_write, {"slot_mapping": torch.Tensor.int}),
    "rotate_and_write-few-keys": (_rotate_and_write, {"key": lambda x: x[:3]}),
    "rotate_and_write-k_scale-0": (_rotate_and_write, {"k_scale": lambda _: 0.0}),
    "rotate_and_write-v_scale-nan": (_rotate_and_write, {"v_scale": lambda _: torch.nan}),
    "write_packed_latents-size": (_packed_latents, {"latents": lambda x: x[:, 1:]}),
    "write_packed_latents-int32-slots": (_packed_latents, {"slot_mapping": torch.Tensor.int}),
    "write_packed_latents-few-rows": (_packed_latents, {"latents": lambda x: x[:3]}),
    "write_packed_latents-bytes": (_packed_latents, {"data": lambda x: x[..., 16:]}),
}
"""OPERATION-name -> the arguments, and what is changed."""
_OPTIONS = ("k_scale", "v_scale", "norm")
"""Arguments that are given by name."""


_PAST = {"slot_mapping": lambda x: x + 4}
"""One slot, of 24, is past the cache."""
_PAST_THE_CACHE = {
    "packed_write-past-the-cache": (_packed_write, _PAST),
    "rotate_and_write-past-the-cache": (_rotate_and_write, _PAST),
    "write_packed_latents-past-the-cache": (_packed_latents, _PAST),
}
"""As `_WRITES`; values of tensors are read on a CPU only."""


def _check(target: BackendUnderTest, case: Case, name: str) -> str:
    operation = name.split("-", 1)[0]
    run = find_operation(target.backend, operation)
    make, changes = (_WRITES | _PAST_THE_CACHE)[name]
    arguments = make(target.device, changes)
    caches = [
        arguments[cache] for cache in ("key_cache", "value_cache", "data") if cache in arguments
    ]
    before = [cache.clone() for cache in caches]
    options = {name: arguments.pop(name) for name in _OPTIONS if name in changes}
    try:
        run(*arguments.values(), **options)
    except ContractError:
        pass
    else:
        return f"{operation} accepts a wrong argument: {', '.join(changes)} | case: {case}"
    if not all(torch.equal(*pair) for pair in zip(before, caches, strict=True)):
        return f"{operation} refuses {', '.join(changes)}, but has written | case: {case}"
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    case = operation_case(target)
    for name in _WRITES if target.on_gpu else _WRITES | _PAST_THE_CACHE:
        yield CheckCase(name, partial(_check, target, case, name))


CHECKS = (Check("R2", "operations refuse arguments that do not fit", _cases),)
