"""What the adapter answers where vLLM's default would claim more."""

from __future__ import annotations

import importlib

import pytest

from tests.integrations.vllm.conftest import Registry


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("backend", "AttnlibBackend", True),
        ("mla_backend", "AttnlibMLABackend", True),
        ("mla_sparse", "AttnlibSparseMLABackend", False),
    ],
)
def test_kv_connectors(registry: Registry, module: str, name: str, expected: bool) -> None:
    backend = getattr(importlib.import_module(f"attnlib.integrations.vllm.{module}"), name)
    assert backend.supports_kv_connector() is expected
