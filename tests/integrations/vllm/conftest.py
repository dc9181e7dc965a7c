"""Stand-ins for the modules of vLLM that the adapter imports. vLLM itself is not installed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import attnlib.integrations.vllm as adapter

GRAPH_LEVELS = "NEVER UNIFORM_SINGLE_TOKEN_DECODE UNIFORM_BATCH ALWAYS"


class _Module(ModuleType):
    """A module of vLLM: every name that is not set is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class Registry:
    """The part of vLLM's registry that the adapter uses: members, paths and overrides."""

    def __init__(self, **paths: str | None) -> None:
        self.overrides: dict[str, str] = {}
        overrides = self.overrides

        class Member(Enum):
            def get_path(self) -> str:
                path: str = overrides.get(self.name, self.value)
                return path

        self.members: Any = Member("AttentionBackendEnum", paths)

    def register_backend(self, member: Any, path: str) -> None:
        self.overrides[getattr(member, "name", member)] = path


def _forget() -> None:
    """Forget the stand-ins and the modules of the adapter that imported them."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "vllm" or name.startswith(f"{adapter.__name__}."):
            del sys.modules[name]
            vars(adapter).pop(name.rpartition(".")[2], None)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The registry of a stand-in for vLLM 0.26, without a current configuration."""
    _forget()
    finder = _Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    registry = Registry(
        CUSTOM=None, CPU_ATTN=f"{__name__}.VllmCpuBackend", FLASH_ATTN="vllm.flash_attn.Backend"
    )
    names: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    names.AttentionBackendEnum = registry.members
    names.register_backend = registry.register_backend
    backend: Any = importlib.import_module("vllm.v1.attention.backend")
    backend.AttentionCGSupport = Enum("AttentionCGSupport", GRAPH_LEVELS)
    cache: Any = importlib.import_module("vllm.config.cache")
    cache.is_known_kv_cache_dtype = lambda name: True
    set_backends(None)
    yield registry
    _forget()


class VllmCpuBackend:
    """vLLM's own backend on a CPU."""


def set_backends(backend: Any, **per_kind: Any) -> None:
    """Make the configuration with these choices vLLM's current one."""
    attention = SimpleNamespace(backend=backend, backend_per_kind=per_kind)
    config = SimpleNamespace(
        attention_config=attention,
        model_config=SimpleNamespace(use_mla=False),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    module: Any = importlib.import_module("vllm.config")
    module.get_current_vllm_config_or_none = lambda: config
