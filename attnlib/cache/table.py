"""The block table of a model runner (P3): one row per request, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlib.device import explains_device
from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count, as_id, as_ids

__all__ = ["BlockTable"]

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_MAX_BLOCK_ID = torch.iinfo(torch.int32).max


class BlockTable:
    """Rows of physical block ids, `[max_reqs, max_blocks]` int32.

    Rows are edited on the host; `commit` copies them to the device once per step. Entries past the
    end of a row are -1. The device tensor keeps its address for the lifetime of the table (G3), so
    CUDA graphs may capture it. A method that raises leaves the table unchanged.

    Args:
        max_reqs: number of rows.
        max_blocks: number of columns: the blocks of the longest request.
        device: device of the tensor that kernels read; None keeps the table on the CPU.

    Raises:
        ContractError: a size below 1.
    """

    @explains_device
    @torch.inference_mode(False)  # writable in and outside of inference mode
    def __init__(
        self, max_reqs: int, max_blocks: int, device: torch.device | str | None = None
    ) -> None:
        max_reqs, max_blocks = as_count("max_reqs", max_reqs), as_count("max_blocks", max_blocks)
        if max_reqs < 1 or max_blocks < 1:
            raise ContractError(
                f"a block table of {max_reqs} rows and {max_blocks} columns cannot hold a request"
            )
        device = torch.device(device or "cpu")
        # Pageable on purpose: when a copy from pageable memory returns, the driver has staged the
        # data, so the next step may edit rows while this step still runs. A pinned buffer would be
        # read later, after the edit.
        self._host = torch.full((max_reqs, max_blocks), -1, dtype=torch.int32, device="cpu")
        self._device = (
            self._host if device.type == "cpu" else torch.full_like(self._host, -1, device=device)
        )
        self.num_blocks_per_row = torch.zeros(max_reqs, dtype=torch.int32, device="cpu")

    @property
    def max_reqs(self) -> int:
        """Number of rows."""
        return self._host.shape[0]

    @property
    def max_blocks(self) -> int:
        """Number of columns."""
        return self._host.shape[1]

    def row(self, index: int) -> list[int]:
        """The block ids of a row."""
        index = self._checked(index)
        count = int(self.num_blocks_per_row[index])
        return [int(block) for block in self._host[index, :count]]

    def add_row(self, block_ids: Sequence[int], index: int) -> None:
        """Replace a row.

        Raises:
            ContractError: `index` is outside the table, the row is too long, or an id is invalid.
        """
        index = self._checked(index)
        row = self._checked_row(block_ids, 0, index)
        self.clear_row(index)
        self._write(row, 0, index)

    def append_row(self, block_ids: Sequence[int], index: int) -> None:
        """Append blocks to a row.

        Raises:
            ContractError: `index` is outside the table, the row is too long, or an id is invalid.
        """
        index = self._checked(index)
        start = int(self.num_blocks_per_row[index])
        self._write(self._checked_row(block_ids, start, index), start, index)

    def clear_row(self, index: int) -> None:
        """Remove all blocks of a row.

        Raises:
            ContractError: `index` is outside the table.
        """
        index = self._checked(index)
        self._host[index] = -1
        self.num_blocks_per_row[index] = 0

    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`: the last request replaces a finished one."""
        source, target = self._checked(source), self._checked(target)
        self._host[target] = self._host[source]
        self.num_blocks_per_row[target] = self.num_blocks_per_row[source]

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows."""
        pair = [self._checked(first), self._checked(second)]
        other = pair[::-1]
        self._host[pair] = self._host[other]
        self.num_blocks_per_row[pair] = self.num_blocks_per_row[other]

    def commit(self, num_reqs: int) -> torch.Tensor:
        """Copy the first `num_reqs` rows to the device without a host synchronization.

        Returns:
            The rows on the device, `[num_reqs, max_blocks]` int32.

        Raises:
            ContractError: the table has fewer rows.
        """
        if as_count("num_reqs", num_reqs) > self.max_reqs:
            raise ContractError(
                f"num_reqs={num_reqs} exceeds the {self.max_reqs} rows of the table", rule="P3"
            )
        if self._device is not self._host:
            self._device[:num_reqs].copy_(self._host[:num_reqs], non_blocking=True)
        return self._device[:num_reqs]

    def get_device_tensor(self) -> torch.Tensor:
        """The whole table on the device, as of the last `commit`."""
        return self._device

    def get_cpu_tensor(self) -> torch.Tensor:
        """The whole table on the host."""
        return self._host

    def _checked(self, index: int) -> int:
        row = as_id("row", index)
        if not 0 <= row < self.max_reqs:
            raise ContractError(f"row {row} is outside the table of {self.max_reqs} rows")
        return row

    def _checked_row(self, block_ids: Sequence[int], start: int, index: int) -> torch.Tensor:
        """`block_ids` as int32, checked to fit row `index` from column `start` on."""
        row = _integers(block_ids, index)
        end = start + row.shape[0]
        if end > self.max_blocks:
            raise ContractError(
                f"row {index} would hold {end} blocks, but the table has {self.max_blocks} "
                f"columns: create it with max_blocks={end} or more",
                rule="P3",
            )
        invalid = (row < 0) | (row > _MAX_BLOCK_ID)
        if bool(invalid.any()):
            raise ContractError(
                f"row {index}: block id {int(row[invalid][0])} is not in 0 to {_MAX_BLOCK_ID}",
                rule="P3",
            )
        return row.to(torch.int32)

    def _write(self, row: torch.Tensor, start: int, index: int) -> None:
        end = start + row.shape[0]
        self._host[index, start:end] = row
        self.num_blocks_per_row[index] = end


def _integers(block_ids: Sequence[int], index: int) -> torch.Tensor:
    """Block ids as int64 `[n]` on the CPU; torch would truncate fractions."""
    if isinstance(block_ids, list | tuple) and bool in map(type, block_ids):
        block_ids = [as_id(f"row {index}: block id", *x[::-1]) for x in enumerate(block_ids)]
    try:
        row = torch.as_tensor(block_ids, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        # torch takes no iterators
        ids = as_ids(f"row {index}: block ids", block_ids, ordered=True)
        ids = [as_id(f"row {index}: block id", *x[::-1]) for x in enumerate(ids)]
        for block in ids:
            if not 0 <= block <= _MAX_BLOCK_ID:
                raise ContractError(
                    f"row {index}: block id {block} is not in 0 to {_MAX_BLOCK_ID}", rule="P3"
                ) from None
        row = torch.tensor(ids, dtype=torch.int64, device="cpu")
    if row.dim() != 1 or (row.numel() and row.dtype not in _INTEGERS):
        example = f", for example {row.flatten()[0].item()}" if row.numel() else ""
        raise ContractError(
            f"row {index}: block ids are {row.dtype} {tuple(row.shape)}{example}; they must be "
            "integers [n]",
            rule="P3",
        )
    return row.to(torch.int64)
