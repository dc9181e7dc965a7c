"""Values of a state layer's call, which ATTNLIB_VALIDATE checks: slots, positions and gates."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.backends.state_impl import StateImpl
from attnlib.cache.states import StateCache
from attnlib.errors import ContractError
from attnlib.instrumentation import checker_for_level
from attnlib.metadata.batch_values import BatchValues
from attnlib.metadata.states import StateMetadata
from attnlib.metadata.values import check_values
from attnlib.ops.states.checks import checked_requests
from attnlib.spec import StateSpec

__all__ = ["validate_convolution", "validate_step"]


def validate_step(
    spec: StateSpec, gates: tuple[Tensor, Tensor | None], cache: StateCache, metadata: StateMetadata
) -> None:
    """With ATTNLIB_VALIDATE: lengths, slots, positions and gates (M1, T5, T7, T8, T12).
    Synchronizes. The gates are log decays and betas.

    Raises:
        ContractError: names the request or token, the value and the limit.
    """
    if not _validates(cache.memory):
        return
    _check_batch(cache, metadata, "state")
    (decay, beta), rows = gates, slice(0, metadata.num_actual_tokens)
    decay = decay if spec.decay == "constant" else decay[rows]
    _validate_gate("log_decay", decay, decay > 0, "must be finite and at most 0")
    if beta is not None and spec.update == "delta":
        beta = beta[rows]
        _validate_gate("beta", beta, (beta < 0) | (beta > 2), "must be finite and from 0 to 2")


def validate_convolution(impl: StateImpl, cache: StateCache, metadata: StateMetadata) -> None:
    """With ATTNLIB_VALIDATE: lengths, slots and positions; without it, if the impl always checks
    positions, these and slots. Synchronizes.

    Raises:
        ContractError: names the request and the slot.
    """
    if impl.checks_positions or _validates(cache.memory):
        # States, too: if the recurrence refused them, the window would be a step ahead.
        _check_batch(cache, metadata, "window", "state")


def _check_batch(cache: StateCache, metadata: StateMetadata, *parts: str) -> None:
    if _validates(cache.memory) and (values := BatchValues.of_metadata(metadata, 1, None, False)):
        check_values(values)
    checked_requests(metadata.batch, cache.tensors, *parts)


def _validates(memory: Tensor) -> bool:
    captures = memory.is_cuda and torch.cuda.is_current_stream_capturing()
    return checker_for_level() is not None and not captures


def _validate_gate(name: str, gate: Tensor, outside: Tensor, limit: str) -> None:
    wrong = (outside | ~gate.isfinite()) & ~gate.isnan()  # NaN stays in its request (T5)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        index = "".join(f"[{i}]" for i in place)
        raise ContractError(f"{name}{index}={gate[tuple(place)].item():g} {limit}", rule="T5")
