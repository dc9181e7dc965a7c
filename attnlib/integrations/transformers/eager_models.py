"""Models that support eager attention only: what a call of them without a mask means."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import nn

__all__ = ["calls_need_masks", "is_causal_module", "take_masks_of_numbers"]


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
    models = _models_of(config_module)
    return models not in sys.modules or _defines_eager_models_only(models)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # untyped in torch
def take_masks_of_numbers(config_module: str) -> bool:
    """Whether the models of a configuration may add masks to scores themselves (GIT): none declares
    whether it supports sdpa, whose masks are bool.

    Args:
        config_module: name of the module that defines the configuration.
    """
    return _declares_no_support(_models_of(config_module))


def _models_of(config_module: str) -> str:
    package, _, name = config_module.rpartition(".")
    return f"{package}.{name.replace('configuration_', 'modeling_', 1)}"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # untyped in torch
def _is_eager_only(name: str) -> bool:
    """Whether a Python module defines models, none of which supports sdpa."""
    return _defines_eager_models_only(name)


@lru_cache(maxsize=256)
def _defines_eager_models_only(name: str) -> bool:
    support = [model._supports_sdpa for model in _models(name)]
    return bool(support) and not any(support)


@lru_cache(maxsize=256)
def _declares_no_support(name: str) -> bool:
    models = _models(name)
    return bool(models) and not any("_supports_sdpa" in vars(model) for model in models)


def _models(name: str) -> list[Any]:
    """The classes of models that a Python module defines."""
    definitions = vars(sys.modules[name]).values() if name in sys.modules else ()
    classes = [cls for cls in definitions if isinstance(cls, type) and cls.__module__ == name]
    return [cls for cls in classes if hasattr(cls, "_supports_sdpa")]
