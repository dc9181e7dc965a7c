"""The batch that `attnlib doctor` runs on each backend."""

from __future__ import annotations

import torch

from attnlib.backends.torch import TorchBackend
from attnlib.cli.smoke_test import smoke_test
from attnlib.device import DeviceInfo


def test_wrong_results_and_exceptions_are_found() -> None:
    class Wrong(TorchBackend.get_impl_cls()):
        def forward(self, query, cache, metadata, output, lse=None):
            super().forward(query, cache, metadata, output, lse)
            output.mul_(1.1)

    class NextBlocks(TorchBackend.get_impl_cls()):
        def forward(self, query, cache, metadata, output, lse=None):
            table = metadata.block_table
            rows = (table[:, :1] + torch.arange(table.shape[1])) % cache.num_blocks
            own, metadata.block_table = table, rows.int()
            super().forward(query, cache, metadata, output, lse)
            metadata.block_table = own

    class Dead(TorchBackend.get_impl_cls()):
        def forward(self, query, cache, metadata, output, lse=None):
            raise RuntimeError("no kernel image is available for execution on the device")

    cpu = DeviceInfo("cpu")
    assert smoke_test(TorchBackend, cpu).startswith("ran ")
    assert smoke_test(
        type("W", (TorchBackend,), {"get_impl_cls": staticmethod(lambda: Wrong)}), cpu
    ).startswith("WRONG ")
    assert smoke_test(
        type("N", (TorchBackend,), {"get_impl_cls": staticmethod(lambda: NextBlocks)}), cpu
    ).startswith("WRONG ")
    assert "no kernel image" in smoke_test(
        type("D", (TorchBackend,), {"get_impl_cls": staticmethod(lambda: Dead)}), cpu
    )
