"""Register the name `attnlib` with transformers, and unregister it.

Two public registries take the attention function and the mask function. Continuous batching needs
more. It calls `is_flash_attention_requested`, which looks for "flash" in the name of the
implementation, to find out whether the implementation reads packed batches without a mask. If so,
it accepts the name (transformers 5.18 and later reject all others), does not replace it by an
installed flash-attn, allocates no `[T, S]` masks, and passes its block table for decode batches.
There is no hook for this, and transformers downloads a package for a name that contains "flash", so
`register` replaces the function in the three modules of continuous batching that call it. Calls for
all other names go to the original.

`register` also wraps the step of continuous batching to check that it reaches every attention
layer. `unregister` restores everything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from attnlib.errors import AttnlibError
from attnlib.integrations.transformers.attention import attnlib_attention
from attnlib.integrations.transformers.continuous import check_layers
from attnlib.integrations.transformers.growing_cache import growing_update
from attnlib.integrations.transformers.masks import attnlib_mask
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec, CudaGraphSupport

__all__ = ["NAME", "register", "unregister"]

NAME = "attnlib"
_PAGED = f"paged|{NAME}"
"""The name that continuous batching uses up to transformers 5.17."""
_NAMES = (NAME, _PAGED)
_MODULES = ("continuous_api", "initialization", "cache")
_FLASH_CHECK = "is_flash_attention_requested"
_FAST_PATHS = ("lazy_import_flash_attention", "lazy_import_paged_flash_attention")

_replaced: list[tuple[Any, str, Any]] = []
"""(module or class, attribute, original) of everything that `register` has replaced."""


def register() -> None:
    """Register `attn_implementation="attnlib"` with transformers. Repeated calls change nothing.

    Models then run by name: `from_pretrained(..., attn_implementation="attnlib")` or
    `model.set_attn_implementation("attnlib")`, in forwards, `generate` and `generate_batch`.
    attnlib selects a backend for each layer.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attnlib_attention)
    AttentionMaskInterface.register(NAME, attnlib_mask)
    if "paged|sdpa" in AttentionInterface._global_mapping:
        AttentionInterface.register(_PAGED, attnlib_attention)
    if not _replaced:
        _patch()


def unregister() -> None:
    """Undo `register`. A model that still uses the name fails at its next forward."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in _NAMES:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    while _replaced:
        owner, attribute, original = _replaced.pop()
        setattr(owner, attribute, original)


def _patch() -> None:
    """Replace what has no public hook: checks of continuous batching, and how a cache grows."""
    for name in _MODULES:
        module = importlib.import_module(f"transformers.generation.continuous_batching.{name}")
        make = _is_requested_for_graphs if name == "initialization" else _is_requested
        _replace(module, _FLASH_CHECK, make)
        for attribute in _FAST_PATHS:
            _replace(module, attribute, _decode_path)
    _replace(
        importlib.import_module("transformers.cache_utils").DynamicLayer, "update", growing_update
    )
    runner = importlib.import_module("transformers.generation.continuous_batching.model_runner")
    _replace(runner.ModelRunner, "compute_batch", _checked_step)


def _replace(
    owner: Any, attribute: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function of a module or class, if the installed version has it."""
    original = getattr(owner, attribute, None)
    if original is not None:
        _replaced.append((owner, attribute, original))
        setattr(owner, attribute, make(original))


def _checked_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_batch(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.config._attn_implementation not in _NAMES:
            return original(self, model, *args, **kwargs)
        with check_layers(self.cache, model):
            return original(self, model, *args, **kwargs)

    return compute_batch


def _is_requested(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_flash_attention_requested(
        config: Any = None,
        requested_attention_implementation: str | None = None,
        version: Any = None,
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name in _NAMES or original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _is_requested_for_graphs(original: Callable[..., bool]) -> Callable[..., bool]:
    """In this module a call without a version decides whether CUDA graphs are on by default."""

    def is_flash_attention_requested(
        config: Any = None,
        requested_attention_implementation: str | None = None,
        version: Any = None,
    ) -> bool:
        if getattr(config, "_attn_implementation", None) not in _NAMES:
            return original(config, requested_attention_implementation, version)
        return version is not None or _can_be_captured(config)

    return is_flash_attention_requested


def _can_be_captured(config: Any) -> bool:
    """Whether a CUDA graph can capture the backend that is selected for this model."""
    if not torch.cuda.is_available():
        return True  # transformers disables graphs itself
    declared = getattr(config, "dtype", None)
    # A config may declare no dtype, or another than the model was loaded with; most backends
    # support 16-bit dtypes only.
    dtypes = [torch.bfloat16, torch.float32]
    if isinstance(declared, torch.dtype) and declared != torch.float32:
        dtypes = [declared]
    for dtype in dtypes:
        heads = config.num_attention_heads
        spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
        )
        try:
            builder = get_attn_backend(spec, None, "cuda").get_builder_cls()
        except AttnlibError:
            continue
        return (
            builder.cudagraph_support is CudaGraphSupport.ALWAYS and not builder.needs_host_lengths
        )
    return False  # no backend is known, and eager steps always work


def _decode_path(original: Callable[..., Any]) -> Callable[..., Any]:
    """Continuous batching tests only whether this function exists; it calls the registered one."""

    def lazy_import(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in _NAMES:
            return original(implementation, *args, **kwargs)
        return (None, attnlib_attention, attnlib_attention), attnlib_attention

    return lazy_import
