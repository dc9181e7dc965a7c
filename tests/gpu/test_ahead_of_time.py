"""A server with kernels that were compiled without a GPU compiles none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.scripts import load
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.slow]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_a_server_process_compiles_nothing(kv_cache_dtype: str) -> None:
    """The kernels of the folder are exactly those that a server without it compiles."""
    pytest.importorskip("triton")
    result = load("start_time").measure((16, 1024, 4096), kv_cache_dtype)
    servers: dict[str, Any] = result["servers"]
    shipped, empty = servers["shipped kernels"], servers["empty cache"]
    assert (shipped["compiled"], shipped["late"]) == (0, [])
    assert (empty["found"], empty["compiled"]) == (0, shipped["found"])
    assert shipped["found"] == result["compile"]["kernels"] >= 8
    assert (servers["warm cache"]["compiled"], servers["warm cache"]["late"]) == (0, [])
