"""The operations of `ops.torch` and `ops.triton` with one name have one signature."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

import pytest

import attnlib.ops.torch
import attnlib.ops.triton

COUNTERPARTS = {
    "cache_write": "write_kv",
    "merge_states": "merge_states",
    "paged_decode": "paged_decode",
    "paged_prefill": "paged_prefill",
    "slots": "compute_slot_mapping",
    "varlen_prefill": "varlen_prefill",
}


@pytest.mark.parametrize("module", COUNTERPARTS)
def test_signatures_are_equal(module: str) -> None:
    """Names, kinds, defaults and annotations of all parameters, and the result."""
    ours, theirs = (
        inspect.signature(
            getattr(import_module(f"attnlib.ops.{folder}.{module}"), COUNTERPARTS[module])
        )
        for folder in ("torch", "triton")
    )
    assert ours == theirs


def test_no_counterpart_is_left_out() -> None:
    """Every module name that both packages have is compared above."""
    names = [
        {found.name for found in pkgutil.iter_modules(package.__path__)}
        for package in (attnlib.ops.torch, attnlib.ops.triton)
    ]
    assert names[0] & names[1] == set(COUNTERPARTS)
