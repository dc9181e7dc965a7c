"""Files of recorded calls of state layers: tensors and plain values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from attnlib.debug.recorded_fields import plain_value
from attnlib.debug.recording_files import KEY_OF_STATES, read_file, refuse_damaged
from attnlib.debug.state_calls import RecordedStateCall
from attnlib.errors import ContractError
from attnlib.spec import StateSpec
from attnlib.testing.tensor_io import pack_tensor, unpack_tensor

__all__ = ["is_state_recording", "load_state_recording", "save_state_recording"]

_VERSION = 1
_LISTS = ("query_lens", "seq_lens", "slots", "sources")


def save_state_recording(call: RecordedStateCall, path: str | Path) -> Path:
    """Write a call to a file and create its folder if necessary.

    Returns:
        The path of the file.
    """
    spec = {field.name: plain_value(getattr(call.spec, field.name)) for field in fields(StateSpec)}
    data = {
        KEY_OF_STATES: _VERSION,
        "spec": spec,
        "part": call.part,
        "scale": call.scale,
        "tensors": {name: x.cpu() for name, x in call.tensors.items()},
        "inputs": [None if x is None else pack_tensor(x) for x in call.inputs],
        "memory": call.memory.cpu(),
        **{name: list(getattr(call, name)) for name in _LISTS},
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(data, target)
    return target


def is_state_recording(path: str | Path) -> bool:
    """Whether a file is a recorded call of a state layer.

    Raises:
        ContractError: it is no file of `torch.save`.
    """
    data = read_file(Path(path))
    return isinstance(data, dict) and KEY_OF_STATES in data


def load_state_recording(path: str | Path, device: torch.device | str = "cpu") -> RecordedStateCall:
    """Read a recording.

    Args:
        path: the file.
        device: where to allocate the tensors.

    Raises:
        ContractError: the file is not a recording of this version, or is damaged.
    """
    data = read_file(Path(path))
    if not isinstance(data, dict) or data.get(KEY_OF_STATES) != _VERSION:
        raise ContractError(
            f"{path} is not a recorded state call of version {_VERSION}: record the call again"
        )
    with refuse_damaged(path):
        return _call(data, device)


def _call(data: Mapping[str, Any], device: torch.device | str) -> RecordedStateCall:
    spec = dict(data["spec"])
    for name in ("dtype", "state_dtype"):
        spec[name] = getattr(torch, spec[name].removeprefix("torch."))
    inputs = (None if x is None else unpack_tensor(x, device) for x in data["inputs"])
    return RecordedStateCall(
        spec=StateSpec(**spec),
        part=data["part"],
        scale=float(data["scale"]),
        tensors={name: x.to(device) for name, x in data["tensors"].items()},
        inputs=tuple(inputs),
        memory=data["memory"].to(device),
        **{name: [int(n) for n in data[name]] for name in _LISTS},
    )
