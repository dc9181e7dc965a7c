"""The operations of `ops.torch` and `ops.triton` with one name have one signature."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

import pytest

import attnlib.ops.torch
import attnlib.ops.triton

COUNTERPARTS = {
    "append_kv": "append_kv",
    "key_indexer": "select_keys",
    "selected_attention": "selected_attention",
    "shared_decode": "shared_decode",
    "cache_write": "write_kv",
    "context_attention": "context_attention",
    "hadamard": "rotate_heads",
    "merge_states": "merge_states",
    "packed_attention": "packed_decode",
    "packed_latents": "packed_latent_attention",
    "paged_decode": "paged_decode",
    "paged_prefill": "paged_prefill",
    "rotary_write": "rotate_and_write",
    "slots": "compute_slot_mapping",
    "varlen_prefill": "varlen_prefill",
    "visible_keys": "list_visible_keys",
}

OF_TORCH = {"plans"}
"""Parameters of the torch operations only: what layers of a step share, which kernels compute."""


@pytest.mark.parametrize("module", COUNTERPARTS)
def test_signatures_are_equal(module: str) -> None:
    """Names, kinds, defaults and annotations of all parameters, and the result."""
    ours, theirs = (
        inspect.signature(
            getattr(import_module(f"attnlib.ops.{folder}.{module}"), COUNTERPARTS[module])
        )
        for folder in ("torch", "triton")
    )
    kept = [each for name, each in ours.parameters.items() if name not in OF_TORCH]
    assert ours.replace(parameters=kept) == theirs


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("merge_states", "merge_partial_rows"),
        ("packed_attention", "packed_prefill"),
        ("packed_attention", "packed_write"),
        ("packed_latents", "write_packed_latents"),
        ("rotary_write", "rotate"),
        ("states.short_convolution", "short_convolution"),
        ("states.state_step", "state_step"),
        ("states.step_parts", "gated_norm"),
        ("states.step_parts", "state_gates"),
    ],
)
def test_signatures_of_further_operations_are_equal(module: str, name: str) -> None:
    """As above, for modules with more than one operation."""
    ours, theirs = (
        inspect.signature(getattr(import_module(f"attnlib.ops.{folder}.{module}"), name))
        for folder in ("torch", "triton")
    )
    assert ours == theirs


def test_no_counterpart_is_left_out() -> None:
    """Every module name that both packages have is compared above."""
    names = [
        {found.name for found in pkgutil.iter_modules(package.__path__) if not found.ispkg}
        for package in (attnlib.ops.torch, attnlib.ops.triton)
    ]
    assert names[0] & names[1] == set(COUNTERPARTS)
