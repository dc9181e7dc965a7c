"""Rows of docs/compatibility.md on the kernels of a GPU: the operations of three seeds."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.compat.seeds.rows import ROWS
from tests.compat.seeds.table import Row
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

OPERATIONS = (
    *("flash_attention_prefill", "paged_attention_decode", "store_kvcache"),
    *("context_attention_fwd", "write_to_paged_cache", "forward_decode", "forward_prefix"),
    *("swap_blocks", "copy_blocks"),
)
ROWS_OF_OPERATIONS = [
    row
    for row in ROWS
    if row.ours is None
    and row.claim.kind == "same"
    and (row.number[0] in "35" or "1.10" <= row.number <= "1.22")
]


def on_gpu(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation with its tensors on the GPU; what it writes to them is copied back."""

    def moved(x: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(moved(each, copies) for each in x)
        if not isinstance(x, torch.Tensor):
            return x
        copies.append((x, x.cuda()))
        return copies[-1][1]

    def run(*args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        given = {name: moved(x, copies) for name, x in kwargs.items()}
        result = operation(*moved(args, copies), **given)
        for tensor, copy in copies:
            tensor.copy_(copy)
        return result.cpu() if isinstance(result, torch.Tensor) else result

    run.__wrapped__ = operation  # type: ignore[attr-defined]  # for `inspect.signature`
    return run


def names_on_gpu(module: ModuleType) -> SimpleNamespace:
    """The names of a module whose operations run on the GPU."""
    names = {name: getattr(module, name) for name in dir(module) if name[:2] != "__"}
    names |= {name: on_gpu(names[name]) for name in OPERATIONS if name in names}
    if "PagedAttention" in names:
        own = names["PagedAttention"]
        static = {
            name: staticmethod(on_gpu(getattr(own, name)))
            for name in OPERATIONS
            if hasattr(own, name)
        }
        names["PagedAttention"] = type("PagedAttention", (own,), static)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("row", ROWS_OF_OPERATIONS, ids=lambda row: row.number)
def test_row_on_a_gpu(row: Row) -> None:
    assert row.difference(names_on_gpu(import_module(row.module))) is None
