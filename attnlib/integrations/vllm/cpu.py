"""attnlib on vLLM's own CPU platform, which takes its own backend whatever the user names.

The platform asks the registry for the class of its own backend. `register` puts a path to this
module there. An attribute of this module is the class for the backend of that name: attnlib's if
the user names attnlib, and vLLM's own otherwise.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from attnlib.errors import UnsupportedConfigError

__all__ = ["register"]

logger = logging.getLogger("attnlib")

_NAMES = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
"""vLLM's own backends on a CPU; a release has some of them."""
_replaced: dict[str, str] = {}
"""Name -> path of the class that was registered before."""


def register() -> None:
    """Register this module for the backends of vLLM's CPU platform; repeated calls do nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in _NAMES:
        member = AttentionBackendEnum.__members__.get(name)
        if member is None or member.get_path() == f"{__name__}.{name}":
            continue
        _replaced[name] = member.get_path()
        register_backend(member, f"{__name__}.{name}")


def __getattr__(name: str) -> Any:
    """The class for vLLM's backend `name`, by vLLM's current configuration."""
    if name not in _replaced:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _names_attnlib():
        from attnlib.integrations.vllm import registered

        logger.info("attnlib: serves the layers of vLLM's %s", name)
        return registered.Backend
    path, _, cls = _replaced[name].rpartition(".")
    return getattr(importlib.import_module(path), cls)


def _names_attnlib() -> bool:
    """Whether the user names attnlib.

    Raises:
        UnsupportedConfigError: attnlib is named for some kinds of layers only.
    """
    from vllm.config import get_current_vllm_config_or_none

    from attnlib.integrations.vllm.names import backend_name

    config = get_current_vllm_config_or_none()
    if config is None:
        return False
    attention = config.attention_config
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    named = {getattr(each, "name", each) for each in (attention.backend, *per_kind.values())}
    if backend_name() in named and len(named) > 1:
        raise UnsupportedConfigError(
            f"vLLM's CPU platform has one backend for all kinds of layers, not {backend_name()} "
            "for some: name it by --attention-backend, without backend_per_kind",
            backend="attnlib",
        )
    return backend_name() in named
