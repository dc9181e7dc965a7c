"""Making the name `attnlib` known to transformers, and forgetting it again.

Two registries take the attention function and the mask function; both are public. Continuous batching needs one more word. Before it runs an
implementation it asks `is_flash_attention_requested`, which looks for "flash" in the name, and means: does this one read packed batches without a
mask? By that answer it accepts the name (transformers 5.18 and later reject any other), does not replace it by an installed flash-attn, allocates no
`[T, S]` masks, and offers its table of pages for decode batches. There is no hook for the answer, and a name with "flash" in it is taken for a
package to download, so `register` puts an answer of its own where continuous batching looks, in its three modules and nowhere else. For every other
name the question goes on to transformers. `unregister` puts everything back.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from attnlib.errors import AttnlibError
from attnlib.integrations.transformers.attention import attnlib_attention
from attnlib.integrations.transformers.masks import attnlib_mask
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec, CudaGraphSupport

__all__ = ["NAME", "register", "unregister"]

NAME = "attnlib"
_PAGED = f"paged|{NAME}"
"""Up to transformers 5.17 continuous batching prefixes the name by itself."""
_NAMES = (NAME, _PAGED)
_MODULES = ("continuous_api", "initialization", "cache")
_QUESTION = "is_flash_attention_requested"
_FAST_PATHS = ("lazy_import_flash_attention", "lazy_import_paged_flash_attention")

_replaced: list[tuple[ModuleType, str, Any]] = []


def register() -> None:
    """Make `attn_implementation="attnlib"` known to transformers; again does no harm.

    Models then run by name: `from_pretrained(..., attn_implementation="attnlib")` or `model.set_attn_implementation("attnlib")`, in forwards,
    `generate` and `generate_batch`. Backends are chosen by attnlib's usual rules, for each layer.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    # dynamo has nothing to gain from tracing into kernels and host-side metadata: a compiled model calls them as they are
    attention = torch.compiler.disable(attnlib_attention)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    mask = torch.compiler.disable(attnlib_mask)  # type: ignore[no-untyped-call]  # as above
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    if "paged|sdpa" in AttentionInterface._global_mapping:
        AttentionInterface.register(_PAGED, attention)
    if not _replaced:
        _answer_continuous_batching()


def unregister() -> None:
    """Undo `register`. A model that still names attnlib fails at its next forward, with transformers' own message."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in _NAMES:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    while _replaced:
        module, attribute, original = _replaced.pop()
        setattr(module, attribute, original)


def _answer_continuous_batching() -> None:
    for name in _MODULES:
        module = importlib.import_module(f"transformers.generation.continuous_batching.{name}")
        _replace(module, _QUESTION, _answer_for_graphs if name == "initialization" else _answer)
        for attribute in _FAST_PATHS:
            _replace(module, attribute, _offer_decode_path)


def _replace(
    module: ModuleType, attribute: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    original = getattr(module, attribute, None)
    if original is not None:
        _replaced.append((module, attribute, original))
        setattr(module, attribute, make(original))


def _answer(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_flash_attention_requested(
        config: Any = None,
        requested_attention_implementation: str | None = None,
        version: Any = None,
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name in _NAMES or original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _answer_for_graphs(original: Callable[..., bool]) -> Callable[..., bool]:
    """Here the answer without a version decides whether CUDA graphs are on by default."""

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
    """Whether CUDA graphs can hold what selection would choose for this model."""
    if not torch.cuda.is_available():
        return True  # transformers turns graphs off by itself
    stated = getattr(config, "dtype", None)
    # A config need not say what dtype its model was loaded in; most backends take 16 bits only.
    for dtype in (
        (stated,)
        if isinstance(stated, torch.dtype) and stated != torch.float32
        else (torch.bfloat16, torch.float32)
    ):
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
    return False  # nothing is known of what the layers will choose, and eager steps always work


def _offer_decode_path(original: Callable[..., Any]) -> Callable[..., Any]:
    """Continuous batching only looks whether a function for paged decodes is there; it calls the registered one."""

    def lazy_import(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in _NAMES:
            return original(implementation, *args, **kwargs)
        return (None, attnlib_attention, attnlib_attention), attnlib_attention

    return lazy_import
