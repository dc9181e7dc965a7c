"""The block table of a runner (P3): one row a request, kept on the host and copied to the device once a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlib.errors import ContractError

__all__ = ["BlockTable"]


class BlockTable:
    """Rows of physical block ids, `[max_reqs, max_blocks]` int32. Entries behind a row's end are -1 and mean nothing.

    The device tensor has one address for the table's lifetime (G3): CUDA graphs may hold it.

    Args:
        max_reqs: rows.
        max_blocks: entries in a row: the longest request's blocks.
        device: where kernels read it; None keeps it on the CPU.
    """

    def __init__(
        self, max_reqs: int, max_blocks: int, device: torch.device | str | None = None
    ) -> None:
        if max_reqs < 1 or max_blocks < 1:
            raise ContractError(
                f"a block table of {max_reqs} rows and {max_blocks} columns cannot hold a request"
            )
        device = torch.device(device or "cpu")
        # Pageable on purpose: the driver has taken its copy when the call returns, so the next step may change rows while this one still runs.
        # A pinned buffer would be read later, behind the host's back.
        self._host = torch.full((max_reqs, max_blocks), -1, dtype=torch.int32, device="cpu")
        self._device = (
            self._host if device.type == "cpu" else torch.full_like(self._host, -1, device=device)
        )
        self.num_blocks_per_row = torch.zeros(max_reqs, dtype=torch.int32, device="cpu")

    @property
    def max_reqs(self) -> int:
        """Rows."""
        return self._host.shape[0]

    @property
    def max_blocks(self) -> int:
        """Entries in a row."""
        return self._host.shape[1]

    def row(self, index: int) -> list[int]:
        """The block ids of a row."""
        count = int(self.num_blocks_per_row[self._checked(index)])
        return [int(block) for block in self._host[index, :count]]

    def add_row(self, block_ids: Sequence[int], index: int) -> None:
        """Replace a row."""
        self.clear_row(index)
        self.append_row(block_ids, index)

    def append_row(self, block_ids: Sequence[int], index: int) -> None:
        """Append blocks to a row.

        Raises:
            ContractError: the row would be wider than the table; it is left as it was.
        """
        start = int(self.num_blocks_per_row[self._checked(index)])
        end = start + len(block_ids)
        if end > self.max_blocks:
            raise ContractError(
                f"row {index} would hold {end} blocks, but the table has {self.max_blocks} columns: make it wider",
                rule="P3",
            )
        self._host[index, start:end] = torch.as_tensor(block_ids, dtype=torch.int32)
        self.num_blocks_per_row[index] = end

    def clear_row(self, index: int) -> None:
        """Empty a row."""
        self._host[self._checked(index)] = -1
        self.num_blocks_per_row[index] = 0

    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` over row `target` (a finished request's place is taken by the last one)."""
        self._host[self._checked(target)] = self._host[self._checked(source)]
        self.num_blocks_per_row[target] = self.num_blocks_per_row[source]

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows."""
        pair, other = [self._checked(first), self._checked(second)], [second, first]
        self._host[pair] = self._host[other]
        self.num_blocks_per_row[pair] = self.num_blocks_per_row[other]

    def commit(self, num_reqs: int) -> torch.Tensor:
        """Copy the first `num_reqs` rows to the device and return them, `[num_reqs, max_blocks]` int32. No host sync."""
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
        if not 0 <= index < self.max_reqs:
            raise ContractError(f"row {index} is outside the table of {self.max_reqs} rows")
        return index
