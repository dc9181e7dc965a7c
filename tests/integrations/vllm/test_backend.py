"""What the adapter answers where vLLM's default would claim more."""

from __future__ import annotations

import importlib

import pytest

from tests.integrations.vllm.conftest import Registry


@pytest.mark.parametrize(
    ("module", "name"), [("backend", "AttnlibBackend"), ("mla_backend", "AttnlibMLABackend")]
)
def test_kv_connectors_were_not_tested(registry: Registry, module: str, name: str) -> None:
    backend = getattr(importlib.import_module(f"attnlib.integrations.vllm.{module}"), name)
    assert backend.supports_kv_connector() is False
