"""The cache write of backends that define none: Triton's on a GPU, torch's elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.backends import attention_impl
from attnlib.backends.attention_impl import AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.ops import dispatch
from attnlib.spec import AttentionSpec


class Plugin(AttentionImpl):
    """A backend that defines `forward` alone."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


def _layer() -> tuple[Plugin, PagedKVCache, torch.Tensor, torch.Tensor]:
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=16
    )
    cache = PagedKVCache.allocate(spec, 2)
    return Plugin(spec), cache, torch.randn(3, 2, 16), torch.randn(3, 2, 16)


def test_a_plug_in_writes_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: the operation is chosen by the new keys, and writes the slots."""
    impl, cache, key, value = _layer()
    asked: list[torch.Tensor] = []

    def operation(module: str, name: str, rows: torch.Tensor, *, in_torch: bool) -> Any:
        assert (module, name, in_torch) == ("cache_write", "write_kv", False)
        asked.append(rows)
        return dispatch.operation(module, name, rows)

    monkeypatch.setattr(attention_impl, "operation", operation)
    impl.write_kv(key, value, cache, torch.tensor([17, -1, 3]))
    assert len(asked) == 1 and asked[0] is key
    assert torch.equal(cache.key_cache[1, 1], key[0])
    assert torch.equal(cache.value_cache[0, 3], value[2])


class _OnGPU:
    """The facts of rows on a GPU that choose an operation."""

    device = torch.device("cuda")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("dtype", "installed", "package"),
    [
        (torch.bfloat16, True, "triton"),
        (torch.float64, True, "torch"),
        (torch.bfloat16, False, "torch"),
    ],
)
def test_operations_on_a_gpu(
    dtype: torch.dtype, installed: bool, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton serves its dtypes where it is installed; Windows builds of torch have none."""
    monkeypatch.setattr(dispatch, "has_triton", lambda: installed)
    monkeypatch.setattr(dispatch, "_load", lambda package, module, name: package)
    rows: Any = _OnGPU(dtype)
    assert dispatch.operation("cache_write", "write_kv", rows) == package
