"""The name under which vLLM knows attnlib."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum

__all__ = ["backend_name"]


def backend_name() -> str:
    """ATTNLIB, or CUSTOM where the names of vLLM's backends are fixed (up to 0.26)."""
    return "ATTNLIB" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
