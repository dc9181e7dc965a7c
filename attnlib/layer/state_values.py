"""Values of a state layer's call, which ATTNLIB_VALIDATE checks: slots, positions and gates."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.backends.state_impl import StateInputs
from attnlib.cache.states import StateCache
from attnlib.errors import ContractError
from attnlib.instrumentation import checker_for_level
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states.checks import check_positions, check_slots
from attnlib.spec import StateSpec

__all__ = ["validate_convolution", "validate_step"]


def validate_step(
    spec: StateSpec,
    inputs: StateInputs,
    cache: StateCache,
    metadata: StateMetadata,
    *,
    gates_are_given: bool = True,
) -> None:
    """With ATTNLIB_VALIDATE: slots, positions and gates (T5, T7, T8, T12). Synchronizes. Gates that
    are not given are not in `inputs`.

    Raises:
        ContractError: names the request or token, the value and the limit.
    """
    if checker_for_level() is None or _is_capturing(inputs.value):
        return
    positions = cache.tensors.positions
    assert positions is not None  # the layer has a recurrence
    _validate_slots(cache, metadata, positions[:, 0, 0], "state")
    if not gates_are_given:
        return
    rows = slice(0, metadata.num_actual_tokens)
    decay = inputs.log_decay if spec.decay == "constant" else inputs.log_decay[rows]
    _validate_gate("log_decay", decay, decay > 0, "must be finite and at most 0")
    if inputs.beta is not None and spec.update == "delta":
        beta = inputs.beta[rows]
        _validate_gate("beta", beta, (beta < 0) | (beta > 2), "must be finite and from 0 to 2")


def validate_convolution(cache: StateCache, metadata: StateMetadata) -> None:
    """With ATTNLIB_VALIDATE: slots and positions of the windows. Synchronizes.

    Raises:
        ContractError: names the request and the slot.
    """
    positions = cache.tensors.window_positions
    if positions is not None and checker_for_level() and not _is_capturing(positions):
        _validate_slots(cache, metadata, positions, "window")


def _validate_slots(
    cache: StateCache, metadata: StateMetadata, positions: Tensor, what: str
) -> None:
    requests = list(metadata.batch.requests())
    check_slots(requests, cache.num_slots)
    check_positions(requests, positions, what)


def _validate_gate(name: str, gate: Tensor, outside: Tensor, limit: str) -> None:
    wrong = (outside | ~gate.isfinite()) & ~gate.isnan()  # NaN stays in its request (T5)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        index = "".join(f"[{i}]" for i in place)
        raise ContractError(f"{name}{index}={gate[tuple(place)].item():g} {limit}", rule="T5")


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
