"""A checker for CUDA graphs: which tensor of a batch's metadata moved between capture and replay.

A graph replays the addresses that it saw. A builder that allocates afresh makes a graph read memory that has long gone to somebody else, and the
result is wrong without any error. The guard remembers every address in the captured metadata and compares it with what is built for a replay.

    guard = GraphGuard(captured)
    ...
    guard.check(builder.build(0, padded))     # then graph.replay()

It reads addresses only, so it costs no synchronisation; still it is a debugging tool, not part of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from attnlib.errors import ContractError

__all__ = ["GraphGuard", "tensor_addresses"]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lies and how it is walked."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class GraphGuard:
    """Remembers where the tensors of captured metadata lie.

    Args:
        metadata: what the graph was captured with; dataclasses and mappings within it are followed, tensors on the CPU are not looked at unless
            `include_cpu`.
        include_cpu: compare CPU tensors too (to test builders without a GPU).
    """

    def __init__(self, metadata: Any, *, include_cpu: bool = False) -> None:
        self._include_cpu = include_cpu
        self._captured = self._places(metadata)

    def moved(self, metadata: Any) -> list[str]:
        """Names of the tensors that a graph would read in the wrong place, each with both addresses or shapes."""
        now, findings = self._places(metadata), []
        for name, place in self._captured.items():
            other = now.get(name)
            if other is None:
                findings.append(f"{name} was a tensor at capture and is none now")
            elif other.address != place.address:
                findings.append(
                    f"{name} was at {place.address:#x} at capture and is at {other.address:#x} now"
                )
            elif (other.shape, other.stride) != (place.shape, place.stride):
                findings.append(
                    f"{name} had shape {place.shape} and strides {place.stride} at capture, now {other.shape} and {other.stride}"
                )
        return findings

    def check(self, metadata: Any) -> None:
        """Raise when the graph would read something else than this metadata holds.

        Raises:
            ContractError: the message names every tensor that moved.
        """
        findings = self.moved(metadata)
        if findings:
            raise ContractError(
                f"a captured graph would read stale memory: {'; '.join(findings)}. Build over persistent buffers (give the builder limits, and the "
                f"batch to AttentionState.begin_forward)"
            )

    def _places(self, metadata: Any) -> dict[str, _Place]:
        return {
            name: _Place(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            for name, tensor in tensor_addresses(metadata)
            if self._include_cpu or tensor.device.type != "cpu"
        }


def tensor_addresses(metadata: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a dataclass or mapping, with its dotted name; host copies (`*_cpu`) and the batch it was built from are left out."""
    if isinstance(metadata, torch.Tensor):
        yield prefix, metadata
    elif isinstance(metadata, Mapping):
        for key, value in metadata.items():
            yield from tensor_addresses(value, f"{prefix}[{key!r}]")
    elif dataclasses.is_dataclass(metadata) and not isinstance(metadata, type):
        for field in dataclasses.fields(metadata):
            if not field.name.endswith("_cpu") and field.name != "common":
                yield from tensor_addresses(
                    getattr(metadata, field.name),
                    f"{prefix}.{field.name}" if prefix else field.name,
                )
