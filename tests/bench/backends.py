"""Backends for tests of the benchmark: a correct one under another name, and wrong ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.backends.torch import TorchBackend

_TorchImpl: Any = TorchBackend.get_impl_cls()


class OneRowOff(_TorchImpl):
    """The last row of its output is 10% too large."""

    def forward(
        self, query: Any, cache: Any, metadata: Any, output: torch.Tensor, lse: Any = None
    ) -> None:
        super().forward(query, cache, metadata, output, lse)
        output[-1] *= 1.1


class LeavesARow(_TorchImpl):
    """Never writes row 1."""

    def forward(
        self, query: Any, cache: Any, metadata: Any, output: torch.Tensor, lse: Any = None
    ) -> None:
        kept = output[1].clone()
        super().forward(query, cache, metadata, output, lse)
        output[1] = kept


class WritesNothing(_TorchImpl):
    """Its cache write does nothing."""

    def write_kv(self, key: Any, value: Any, cache: Any, slot_mapping: Any) -> None:
        pass


class Raises(_TorchImpl):
    """Fails at the first call."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image\nand a long trace")


class FailsToBuildAgain(_TorchImpl):
    """Correct, but its cache write works only once, so its layer cannot be called."""

    calls = 0

    def write_kv(self, key: Any, value: Any, cache: Any, slot_mapping: Any) -> None:
        type(self).calls += 1
        if type(self).calls > 1:
            raise RuntimeError("writes once only")
        super().write_kv(key, value, cache, slot_mapping)


class NotesCalls(_TorchImpl):
    """Writes the number of query rows of each call to a file of its process."""

    def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with (Path(os.environ["NOTED_CALLS"]) / str(os.getpid())).open("a") as file:
            file.write(f"{len(query)} ")
        super().forward(query, *args, **kwargs)


def _backend(name: str, impl: type[AttentionImpl]) -> type[TorchBackend]:
    body = {
        "get_name": staticmethod(lambda: name),
        "get_impl_cls": staticmethod(lambda: impl),
        "__module__": __name__,
    }
    return type(name, (TorchBackend,), body)


Right = _backend("Right", _TorchImpl)
WrongRow = _backend("WrongRow", OneRowOff)
WrongHole = _backend("WrongHole", LeavesARow)
WrongWrite = _backend("WrongWrite", WritesNothing)
Broken = _backend("Broken", Raises)
NoSinks = _backend("NoSinks", _TorchImpl)
NoSinks.capabilities = replace(TorchBackend.capabilities, sink=False)
Noted = _backend("Noted", NotesCalls)
HalfBroken = _backend("HalfBroken", FailsToBuildAgain)
