"""vLLM's own CPU platform: attnlib where the user names it, vLLM's backend otherwise."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm import register
from tests.integrations.vllm.conftest import Registry, VllmCpuBackend, set_backends


def resolved(registry: Registry) -> Any:
    """The class that vLLM's CPU platform gets: it asks for CPU_ATTN whatever the user names."""
    path, _, name = registry.members.CPU_ATTN.get_path().rpartition(".")
    return getattr(importlib.import_module(path), name)


def test_the_platform_serves_what_the_user_names(registry: Registry) -> None:
    register()
    register()  # vLLM loads its plug-ins more than once
    assert registry.overrides["CUSTOM"] == "attnlib.integrations.vllm.registered.Backend"
    assert resolved(registry) is VllmCpuBackend
    set_backends(registry.members.FLASH_ATTN)
    assert resolved(registry) is VllmCpuBackend
    set_backends(registry.members.CUSTOM)
    assert resolved(registry).__name__ == "AttnlibBackend"
    set_backends(registry.members.CUSTOM, full_attention=registry.members.CUSTOM)
    assert resolved(registry).__name__ == "AttnlibBackend"


def test_attnlib_for_some_kinds_of_layers_is_refused(registry: Registry) -> None:
    register()
    set_backends(None, full_attention=registry.members.CUSTOM)
    with pytest.raises(UnsupportedConfigError, match="one backend for all kinds of layers"):
        resolved(registry)


def test_other_names_of_the_module_are_errors(registry: Registry) -> None:
    register()
    with pytest.raises(AttributeError, match="CPU_MLA"):
        _ = importlib.import_module("attnlib.integrations.vllm.cpu").CPU_MLA
