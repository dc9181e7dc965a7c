"""Check for CUDA graphs: which tensors of the metadata moved between capture and replay.

A graph replays the addresses that it captured. If a builder allocates new tensors for each batch, a
graph reads memory that was freed, and the result is wrong without an error. The guard stores every
address in the captured metadata and compares it with the metadata that is built for a replay.

    guard = GraphGuard(captured)
    ...
    guard.check(builder.build(0, padded))     # then graph.replay()

It reads addresses only, so it does not synchronize. It is a debugging tool and not part of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from attnlib.errors import ContractError

__all__ = ["GraphGuard", "tensor_addresses"]


@dataclasses.dataclass(frozen=True)
class _Location:
    """Address, shape and strides of a tensor."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class GraphGuard:
    """Stores the locations of all tensors in captured metadata.

    Args:
        metadata: the metadata of the capture. Nested dataclasses and mappings are included.
        include_cpu: compare CPU tensors too, to test builders without a GPU.
    """

    def __init__(self, metadata: object, *, include_cpu: bool = False) -> None:
        self._include_cpu = include_cpu
        self._captured = self._locations(metadata)

    def moved(self, metadata: object) -> list[str]:
        """Find the tensors that a graph would read at the wrong location.

        Args:
            metadata: the metadata that was built for a replay.

        Returns:
            One line per tensor: its name, and both addresses or shapes.
        """
        now, findings = self._locations(metadata), []
        for name, captured in self._captured.items():
            other = now.get(name)
            if other is None:
                findings.append(f"{name} was a tensor at capture and is none now")
            elif other.address != captured.address:
                findings.append(
                    f"{name} was at {captured.address:#x} at capture and is at "
                    f"{other.address:#x} now"
                )
            elif (other.shape, other.stride) != (captured.shape, captured.stride):
                findings.append(
                    f"{name} had shape {captured.shape} and strides {captured.stride} at "
                    f"capture, now {other.shape} and {other.stride}"
                )
        return findings

    def check(self, metadata: object) -> None:
        """Check that a graph reads the tensors of this metadata.

        Raises:
            ContractError: the message names every tensor that moved.
        """
        findings = self.moved(metadata)
        if findings:
            raise ContractError(
                f"a captured graph would read stale memory: {'; '.join(findings)}. Build over "
                f"persistent buffers (give the builder limits, and pass the batch to "
                f"AttentionState.begin_forward)"
            )

    def _locations(self, metadata: object) -> dict[str, _Location]:
        return {
            name: _Location(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            for name, tensor in tensor_addresses(metadata)
            if self._include_cpu or tensor.device.type != "cpu"
        }


def tensor_addresses(source: object, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in a dataclass or mapping, with their dotted names.

    Host copies (`*_cpu`) and the batch that the metadata was built from (`common`) are skipped.
    """
    if isinstance(source, torch.Tensor):
        yield prefix, source
    elif isinstance(source, Mapping):
        for key, value in source.items():
            yield from tensor_addresses(value, f"{prefix}[{key!r}]")
    elif dataclasses.is_dataclass(source) and not isinstance(source, type):
        for field in dataclasses.fields(source):
            if not field.name.endswith("_cpu") and field.name != "common":
                yield from tensor_addresses(
                    getattr(source, field.name),
                    f"{prefix}.{field.name}" if prefix else field.name,
                )
