"""Models that support eager attention only: what a call of them without a mask means."""

from __future__ import annotations

import sys
from functools import lru_cache

import torch
from torch import nn

__all__ = ["calls_need_masks", "is_causal_module"]


def is_causal_module(module: nn.Module) -> bool:
    """Whether a module without a mask is causal.

    The sdpa and flash attention functions of transformers then follow `module.is_causal`; the eager
    function does not mask. A model that supports eager attention only may depend on that.
    """
    return bool(getattr(module, "is_causal", True)) and not _is_eager_only(type(module).__module__)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # untyped in torch
def calls_need_masks(config_module: str) -> bool:
    """Whether attention without a mask is not causal in the models of a configuration, or may not
    be, because their Python module is not known.

    Args:
        config_module: name of the module that defines the configuration.
    """
    package, _, name = config_module.rpartition(".")
    models = f"{package}.{name.replace('configuration_', 'modeling_', 1)}"
    return models not in sys.modules or _defines_eager_models_only(models)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # untyped in torch
def _is_eager_only(name: str) -> bool:
    """Whether a Python module defines models, none of which supports sdpa."""
    return _defines_eager_models_only(name)


@lru_cache(maxsize=256)
def _defines_eager_models_only(name: str) -> bool:
    definitions = vars(sys.modules[name]).values() if name in sys.modules else ()
    classes = [cls for cls in definitions if isinstance(cls, type) and cls.__module__ == name]
    support = [cls._supports_sdpa for cls in classes if hasattr(cls, "_supports_sdpa")]
    return bool(support) and not any(support)
