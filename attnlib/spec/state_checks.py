"""Checks of a state spec when it is made: values that no state layer can have."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from attnlib.errors import ContractError
from attnlib.spec.checks import check_dtype

if TYPE_CHECKING:
    from attnlib.spec.state_spec import StateSpec

__all__ = ["STATE_FORMS", "check_state_spec"]

STATE_FORMS = ("plain", "snapshots", "tail")
"""Forms of a slot (T9)."""

_NAMES: dict[str, tuple[tuple[str | None, ...], str]] = {
    "update": (("delta", "add"), "T2"),
    "decay": (("head", "channel", "constant"), "T5"),
    "conv_activation": (("silu", None), "T6"),
    "form": ((*STATE_FORMS, None), "T9"),
}
_LEAST_CHUNK = 16


def check_state_spec(spec: StateSpec) -> None:
    """Check all fields of a spec.

    Raises:
        ContractError: no state layer can have this value, or these values together.
    """
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.type == "int":
            _check_count(field.name, value)
        elif field.type == "bool" and not isinstance(value, bool):
            raise ContractError(f"{field.name}={value!r} must be True or False")
    for name, (allowed, rule) in _NAMES.items():
        value = getattr(spec, name)
        if value not in allowed:
            raise ContractError(
                f"{name}={value!r} must be {' or '.join(map(repr, allowed))}", rule=rule
            )
    _check_recurrence(spec)
    _check_convolution(spec)
    _check_dtypes(spec)
    _check_slots(spec)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ContractError(f"{name}={value!r} must be an integer of at least 0")


def _check_recurrence(spec: StateSpec) -> None:
    if not spec.num_heads:
        for name in ("num_key_heads", "key_size", "value_size", "has_skip", "qk_norm"):
            if getattr(spec, name):
                raise ContractError(
                    f"{name}={getattr(spec, name)} with num_heads=0, a layer without a "
                    f"recurrence: give num_heads, or leave {name} out"
                )
        if not spec.conv_channels:
            raise ContractError(
                "num_heads=0 and conv_channels=0: a state layer has a recurrence, a convolution, "
                "or both"
            )
        return
    for name in ("num_key_heads", "key_size", "value_size"):
        if not getattr(spec, name):
            raise ContractError(
                f"{name}=0 must be at least 1 in a layer with num_heads={spec.num_heads}", rule="T2"
            )
    if spec.num_heads % spec.num_key_heads:
        raise ContractError(
            f"num_heads={spec.num_heads} is not a multiple of num_key_heads={spec.num_key_heads}: "
            "all key heads must have the same number of state heads",
            rule="T4",
        )


def _check_convolution(spec: StateSpec) -> None:
    if spec.conv_channels and spec.conv_width < 2:
        raise ContractError(
            f"conv_width={spec.conv_width} with conv_channels={spec.conv_channels} must be at "
            "least 2: a convolution sees the token and those before it",
            rule="T6",
        )
    if not spec.conv_channels and (spec.conv_width or spec.has_conv_bias):
        raise ContractError(
            f"conv_width={spec.conv_width} and has_conv_bias={spec.has_conv_bias} with "
            "conv_channels=0: give conv_channels, or leave both out",
            rule="T6",
        )


def _check_dtypes(spec: StateSpec) -> None:
    check_dtype(spec.dtype)
    if spec.state_dtype not in (torch.float32, torch.bfloat16):
        raise ContractError(
            f"state_dtype={spec.state_dtype!r} must be torch.float32 or torch.bfloat16", rule="T13"
        )


def _check_slots(spec: StateSpec) -> None:
    chunk = spec.chunk_size
    if chunk is not None:
        _check_count("chunk_size", chunk)
        if chunk < _LEAST_CHUNK or chunk & (chunk - 1):
            raise ContractError(
                f"chunk_size={chunk} must be a power of two of at least {_LEAST_CHUNK}, or None "
                "for the choice of the backend",
                rule="T9",
            )
    if spec.form is not None and not spec.fits(spec.form):
        reason, rule = (
            ("batch_invariant=True, which needs form='tail'", "T18")
            if spec.batch_invariant
            else (f"max_rollback={spec.max_rollback}, and such a slot takes no token back", "T10")
        )
        raise ContractError(f"form={spec.form!r} with {reason}: leave form=None", rule=rule)
