"""Each row of docs/compatibility.md on the original and on attnlib, and what it claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnlib import env
from attnlib.backends.torch import TorchBackend
from attnlib.compat import vllm
from attnlib.compat.vllm import backend_utils
from attnlib.errors import ContractError
from attnlib.ops import dispatch
from tests.compat.seeds import v1_utils_original
from tests.compat.seeds.rows import ROWS, SEEDS
from tests.compat.seeds.table import Row
from tests.compat.seeds.wrong import WRONG, Wrong

EXPECTED = {1: 23, 2: 41, 3: 27, 4: 32, 5: 13}
"""Rows of the seeds: the audit of their documents has as many."""
MOST_DIFFERENT = 8


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*env.ENVIRONMENT, *env.FOREIGN_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_row(row: Row, request: pytest.FixtureRequest) -> None:
    """ "same" and "other name" mean equal results; "differs" means that they are not."""
    assert request.node.nodeid == row.reference
    found = row.difference()
    if row.claim.kind == "differs":
        assert found is not None, f"{row.name} is the same, but is said to differ"
    else:
        assert found is None, f"{row.name}, said to be the same: {found}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_a_module_without_the_names_is_not_the_same(row: Row) -> None:
    """No row passes whatever the module does."""
    assert "raises AttributeError" in str(row.difference(SimpleNamespace()))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.row} {wrong.what}")
def test_a_wrong_original_is_noticed(wrong: Wrong) -> None:
    """The rows compare what they name."""
    row = next(row for row in ROWS if row.number == wrong.row)
    assert row.difference(wrong.namespace) is not None


def test_the_original_is_the_same_as_itself() -> None:
    """Random numbers are those of the row, and no run leaves anything to the next one."""
    for row in ROWS:
        assert row.difference(row.original) is None, row.name


def test_the_variable_of_the_original_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other name of row 4.20 is the only one."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert [row.number for row in ROWS if row.claim.kind == "other name"] == ["4.20"]
    layouts = []
    for module in (v1_utils_original, backend_utils):
        module.get_kv_cache_layout.cache_clear()
        layouts.append(module.get_kv_cache_layout())
        module.get_kv_cache_layout.cache_clear()
    assert layouts == ["HND", "NHD"]


def test_what_the_notes_say() -> None:
    """Of attnlib, where the seeds say nothing."""
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=TorchBackend)
    with vllm.set_forward_context(None):  # a profiling run
        out = layer(torch.ones(3, 128), torch.ones(3, 64), torch.ones(3, 64))
    assert out.shape == (3, 128) and not out.any()
    virtual = backend_utils.make_local_attention_virtual_batches(
        4, np.array([0, 0, 2]), np.array([6, 4]), torch.zeros(2, 4, dtype=torch.int32), 2
    )
    assert virtual[0].tolist() == [2]  # the request without new tokens has none
    with pytest.raises(ContractError, match="fp8_inc"):
        vllm.get_attn_backend(64, torch.float32, "fp8_inc", 16)
    with pytest.raises(TypeError, match="unexpected arguments own"):
        vllm.Attention(4, 32, 0.2, 2, attn_backend=TorchBackend, own=1)


SERVED_BY_TORCH = ("3.10", "3.15")
"""Rows with blocks that are no power of two, which no kernel serves."""
KERNEL_ROWS = [
    row
    for row in ROWS
    if row.number[0] in "135" and row.ours is None and row.number not in SERVED_BY_TORCH
]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; tests/gpu has its kernels")
@pytest.mark.parametrize("row", KERNEL_ROWS, ids=lambda row: row.number)
def test_row_on_kernels(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of the first, third and fifth seed by the kernels of a GPU."""
    load = dispatch._load
    monkeypatch.setattr(dispatch, "_load", lambda _, *names: load("triton", *names))
    assert row.difference() is None


def test_every_row_of_the_seeds_is_there() -> None:
    assert {seed.number: len(seed.rows) for seed in SEEDS} == EXPECTED
    assert len({row.number for row in ROWS}) == len(ROWS) == 136


def test_few_rows_differ_and_each_says_why() -> None:
    counts = Counter(row.claim.kind for row in ROWS)
    assert counts["differs"] <= MOST_DIFFERENT
    assert set(counts) <= {"same", "other name", "differs"}
    for row in ROWS:
        assert (row.claim.kind == "same") == (not row.claim.text), row.name
