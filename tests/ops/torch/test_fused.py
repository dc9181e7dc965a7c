"""Rows that see no key under a value scale of NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnlib.testing.backend_under_test import load_backend
from attnlib.testing.case import Case
from attnlib.testing.runner import run_materialized_case


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_without_keys_stay_zero(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M5 holds also where M9 makes the other rows of a head NaN."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    case = Case(
        batch="q3s1",
        kv_cache_dtype="fp8_e4m3",
        kv_scale_kind="head",
        v_scale=2.0,
        batch_invariant=batch_invariant,
    )
    step = case.materialize("cpu")
    params = dataclasses.replace(step.params, v_scale=torch.tensor([2.0, float("nan")]))
    found = run_materialized_case(load_backend("torch"), dataclasses.replace(step, params=params))
    assert not found.out[:2].any(), "no key is visible"
    assert found.out[2, 2:].isnan().all() and not found.out[2, :2].isnan().any()
