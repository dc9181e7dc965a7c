"""Models whose attention backends SGLang checks against a fixed list, which plug-ins cannot extend.

SGLang's hook registry opens the check for gpt-oss: it sees `triton`, whose features attnlib has
there (sinks, windows). Other lists stay closed: Gemma 4 masks images for `triton` only, and those
of Llama 4 and EXAONE 4 are local to a function that also reads the name for other decisions.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

__all__ = ["open_model_lists"]

logger = logging.getLogger("attnlib")

_MODULE = "sglang.srt.arg_groups.model_hook"
_SERVED = ("GptOssForCausalLM",)
"""Architectures whose check sees `triton` for attnlib."""


def open_model_lists(name: str) -> None:
    """Register the hook; nothing happens in releases that check elsewhere (0.5.17).

    Args:
        name: of attnlib's backend.
    """
    try:
        importlib.import_module(_MODULE)
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError:
        return

    def backends_of(ask: Any, view: Any) -> Any:
        from sglang.srt.arg_groups.model_override_base import model_config_of

        found = ask(view)
        if name not in found:
            return found
        architecture = model_config_of(view).hf_config.architectures[0]
        if architecture not in _SERVED:
            return found
        logger.warning(
            "attnlib: SGLang's list of attention backends for %s is fixed; its check sees triton",
            architecture,
        )
        return tuple("triton" if each == name else each for each in found)

    HookRegistry.register(f"{_MODULE}.attention_backends_of", backends_of, HookType.AROUND)
