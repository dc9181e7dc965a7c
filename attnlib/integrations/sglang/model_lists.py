"""Models whose attention backends SGLang checks against a fixed list, which plug-ins cannot extend.

SGLang's hook registry opens the checks of models whose features attnlib has: sinks and windows of
gpt-oss, chunks of Llama 4, windows of EXAONE 4. They see `triton`; everything else sees the name.
The list of Gemma 4 stays closed: its windows have pools with other head sizes.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

__all__ = ["open_model_lists"]

logger = logging.getLogger("attnlib")

_MODULE = "sglang.srt.arg_groups.model_hook"
_SERVED = (
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "Exaone4ForCausalLM",
    "ExaoneMoEForCausalLM",
    "ExaoneMoeForCausalLM",
)
"""Architectures whose checks see `triton` for attnlib."""
_FIELDS = "attention_backend", "prefill_attention_backend", "decode_attention_backend"


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

    def resolved_view(view_of: Any, arguments: Any) -> Any:
        from sglang.srt.arg_groups import model_override_base as base

        view = view_of(arguments)
        shown = {field: "triton" for field in _FIELDS if getattr(view, field) == name}
        if not shown:
            return view
        architecture = base.model_config_of(view).hf_config.architectures[0]
        if architecture not in _SERVED:
            return view
        _announce(architecture)
        return base.ResolvedView(base.record_of(view), {**view._overlay, **shown})

    # The module's own name for the function: only its checks ask there.
    HookRegistry.register(f"{_MODULE}.resolved_view", resolved_view, HookType.AROUND)


@functools.lru_cache(maxsize=len(_SERVED))
def _announce(architecture: str) -> None:
    logger.warning(
        "attnlib: SGLang's list of attention backends for %s is fixed; its check sees triton",
        architecture,
    )
