"""Checks of the arguments of divided layers (X1, X6, X8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlib import env
from attnlib.device import resolve_device
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.kv_dtype import KVFormat
from attnlib.layer.per_head import checked_softmax_scale
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.parallel.divisions import Division
from attnlib.parallel.exchange import Exchange, ExchangeMethod, choose_exchange
from attnlib.parallel.group import RankGroup
from attnlib.spec import AttentionSpec

__all__ = [
    "check_choices",
    "check_division",
    "check_ranks",
    "checked_method",
    "checked_per_head",
    "checked_setup",
    "effective_agreement",
    "exchange_of",
    "shares_memory",
    "spec_facts",
    "tries_memory",
]

_AGREEMENTS = ("call", "batch", "never")
_VARYING = {
    ExchangeMethod.REDUCE_SCATTER: "its sums have no fixed order",
    ExchangeMethod.PEER_MEMORY: "large batches are merged by all_to_all, in other arithmetic",
}
"""Why an exchange is not batch invariant."""


def spec_facts(spec: AttentionSpec) -> tuple[str, KVFormat, KVFormat]:
    """What ranks compare of a spec: a format of a package has a version, which its name hides."""
    return str(spec), spec.kv_format, spec.value_format


def effective_agreement(agreement: str) -> str:
    """When ranks agree: with ATTNLIB_VALIDATE=1 with every call instead of once per batch."""
    return "call" if agreement == "batch" and env.read("ATTNLIB_VALIDATE") else agreement


def check_ranks(group: Any) -> None:
    """Whether a layer got ranks.

    Raises:
        ContractError: on this rank, since it cannot ask others.
    """
    if not hasattr(group, "agreed"):
        raise ContractError(
            f"group is a {type(group).__name__}; pass an attnlib.parallel.RankGroup, which wraps a "
            "process group of torch.distributed",
            rule="X8",
        )


def checked_setup(
    group: RankGroup, spec: Any, scale: float | None, device: Any
) -> tuple[torch.device, float]:
    """The device of a layer on this rank, whose tensors the group exchanges, and its scale.

    Raises:
        ContractError: no spec, an unknown device or one of which the group exchanges no tensors, or
            a scale that is not finite.
    """
    AttentionSpec.check_kind(spec, "a divided layer")
    found = resolve_device(device).torch_device
    group.check_device(found)
    given = checked_softmax_scale(scale)
    return found, spec.head_size**-0.5 if given is None else given


def check_choices(
    group: RankGroup,
    division: Division,
    agreement: str,
    choice: tuple[str, str | None, tuple[str, ...]],
) -> None:
    """Check the arguments that divided layers have in common.

    Args:
        group, division, agreement: of the layer.
        choice: name of another argument, its value or None, and the values that are known.

    Raises:
        ContractError: a value that is not known, or a division for another number of ranks.
    """
    for name, value, known in (("agreement", agreement, _AGREEMENTS), choice):
        if value not in known and (value is not None or name == "agreement"):
            raise ContractError(f"{name}={value!r} must be one of {', '.join(known)}", rule="X8")
    check_division(division, group.world_size)
    if division.world_size != group.world_size:
        raise ContractError(
            f"{division} is for {division.world_size} ranks, the group has {group.world_size}",
            rule="X1",
        )


def check_division(division: Any, world_size: int = 2) -> None:
    """Whether an argument is a division.

    Raises:
        ContractError: it is not.
    """
    if not isinstance(division, Division):
        raise ContractError(
            f"division is a {type(division).__name__}; pass attnlib.parallel.Interleaved("
            f"{world_size}), or another Division of as many ranks as the group",
            rule="X1",
        )


def checked_method(
    spec: AttentionSpec,
    group: RankGroup,
    division: Division,
    exchange: str | None,
    agreement: str,
) -> ExchangeMethod:
    """The exchange of a layer.

    Raises:
        ContractError: a value that is not known, or a division for another number of ranks.
        UnsupportedConfigError: batch invariance with an exchange whose arithmetic varies.
    """
    names = tuple(method.value for method in ExchangeMethod)
    check_choices(group, division, agreement, ("exchange", exchange, names))
    if exchange is None:
        return choose_exchange(spec, group.world_size)
    method = ExchangeMethod(exchange)
    if spec.batch_invariant and method in _VARYING:
        raise UnsupportedConfigError(
            f"batch_invariant=True with exchange={exchange!r}: {_VARYING[method]}; use "
            "'all_to_all'",
            reasons=[f"{exchange} is not batch invariant"],
        )
    if method is ExchangeMethod.PEER_MEMORY and spec.dtype == torch.float64:
        raise UnsupportedConfigError(
            "exchange='peer_memory' with dtype=torch.float64: use 'all_to_all'",
            reasons=["peer_memory does not serve float64"],
        )
    return method


def exchange_of(
    group: RankGroup, spec: AttentionSpec, exchange: str | None, device: torch.device
) -> Exchange:
    """The exchange of a layer, after `checked_method`. All ranks call this together.

    Args:
        group: of the layer.
        spec: of the layer, with the query heads of one rank.
        exchange: a value of `ExchangeMethod`; None takes the memory of the GPUs where all ranks can
            write it, and else what receives fewer bytes.
        device: of this rank.

    Raises:
        UnsupportedConfigError: on all ranks, if one cannot write the memory of another, and
            `exchange` asks for that.
    """
    method = choose_exchange(spec, group.world_size) if exchange is None else None
    if group.world_size > 1 and shares_memory(spec, exchange, device.type):
        found = group.peers(device)
        if isinstance(found, PeerBuffers):
            return Exchange(group, spec, ExchangeMethod.PEER_MEMORY, found)
        if exchange is not None:
            raise UnsupportedConfigError(
                f"exchange='peer_memory': {'; '.join(found)}: use 'all_to_all'", reasons=found
            )
    return Exchange(group, spec, method or ExchangeMethod(exchange))


def shares_memory(spec: AttentionSpec, exchange: str | None, device_type: str) -> bool:
    """Whether a layer asks all ranks for their memory; equal on all of them, or they wait."""
    if exchange is None:
        return tries_memory(spec, device_type)
    return exchange == ExchangeMethod.PEER_MEMORY.value


def tries_memory(spec: AttentionSpec, device_type: str) -> bool:
    """Whether layers exchange by memory where it is possible, unless they are told otherwise."""
    return device_type == "cuda" and spec.dtype != torch.float64 and not spec.batch_invariant


def checked_per_head(
    name: str, values: Tensor | None, needed: bool, spec: AttentionSpec
) -> Tensor | None:
    """Slopes or sinks `[Hq]`, given exactly where the spec has them.

    Raises:
        ContractError: missing, not declared, or of another shape or dtype.
    """
    if needed != (values is not None):
        given = "missing" if values is None else "given"
        raise ContractError(f"{name} is {given}, and the spec says otherwise: {spec}", rule="M3")
    is_tensor = isinstance(values, Tensor) and values.is_floating_point()
    if values is not None and not (is_tensor and values.shape == (spec.num_heads,)):
        form = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else values
        raise ContractError(
            f"{name} is {form}; it must be a floating-point tensor [{spec.num_heads}]", rule="M3"
        )
    return values
