"""The tensors of divided batches that CUDA graphs read (X9)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attnlib.errors import ContractError

__all__ = ["GraphTensors"]


class GraphTensors:
    """Tensors at fixed addresses, by name and number of rows; none before the first capture.

    Attributes:
        captures: whether a graph will read the tensors of the batch that is built.
        batches: of captures. They keep the scratch memory whose address a graph holds.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.Size], Tensor] = {}
        self.captures = False
        self.batches: list[object] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """The batch that is built inside is the one of a capture."""
        self.captures = True
        try:
            yield
        finally:
            self.captures = False

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """The values of a tensor in the memory that a graph reads, if one was captured with as
        many rows.

        Args:
            name: of the tensor in a batch.
            tensor: a new one, or one of the caller, which is not written later. A table
                `[rows, columns]` may be narrower than that of the capture.

        Raises:
            ContractError: a wider table than that of the capture.
        """
        key = (name, tensor.shape[:1])
        kept = self._kept.get(key)
        if kept is None:
            if self.captures:
                kept = self._kept[key] = tensor.clone()
            return tensor if kept is None else kept
        if tensor.dim() == 1:
            return kept.copy_(tensor)
        columns, most = tensor.shape[1], kept.shape[1]
        if columns > most:
            raise ContractError(
                f"block_table_tensor has {columns} columns, but the graph of batches with "
                f"{tensor.shape[0]} rows was captured with {most}: capture with the widest table",
                rule="X9",
            )
        kept[:, :columns].copy_(tensor)
        return kept
