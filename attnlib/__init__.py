"""attnlib: attention backends for LLM inference over a paged KV cache.

    setup, once        AttentionSpec -> get_attn_backend or explain -> a backend class
                       PagedKVCache.allocate
    step, per batch    CommonAttentionMetadata -> the backend's builder -> metadata
    layer, per layer   Attention(q, k, v, cache, metadata) -> output and, on request, the LSE

Layers with a recurrent state have `StateSpec`, `StateCache` and `StateLayer` in the same three
phases.

Public names are imported on first use: `import attnlib` imports neither triton nor any kernel
package and does not initialize CUDA.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnlib import errors as errors
from attnlib.instrumentation import VALIDATORS as _VALIDATORS

__version__ = "0.1.0"

_PUBLIC = {
    "Attention": "attnlib.layer",
    "AttentionBackend": "attnlib.backends.base",
    "AttentionImpl": "attnlib.backends.base",
    "AttentionMetadata": "attnlib.metadata.batch_metadata",
    "AttentionMetadataBuilder": "attnlib.metadata.builder",
    "AttentionSpec": "attnlib.spec",
    "AttentionState": "attnlib.metadata.state",
    "AttentionType": "attnlib.spec",
    "AttnlibError": "attnlib.errors",
    "BatchLimits": "attnlib.workspace",
    "BlockAllocator": "attnlib.cache.allocator",
    "BlockTable": "attnlib.cache.table",
    "Capabilities": "attnlib.capabilities",
    "CommonAttentionMetadata": "attnlib.metadata.common",
    "CudaGraphSupport": "attnlib.spec",
    "MaskKind": "attnlib.spec",
    "PagedKVCache": "attnlib.cache.storage",
    "Sizes": "attnlib.capabilities",
    "StateCache": "attnlib.cache.states",
    "StateCapabilities": "attnlib.capabilities",
    "StateImpl": "attnlib.backends.base",
    "StateLayer": "attnlib.layer",
    "StateSpec": "attnlib.spec",
    "explain": "attnlib.selection",
    "get_attn_backend": "attnlib.selection",
    "list_backends": "attnlib.selection",
    "register_backend": "attnlib.selection",
    "select_for_groups": "attnlib.selection",
    "use_backend": "attnlib.selection",
    "warmup": "attnlib.layer.warmup",
}
"""Public name -> module that defines it. Other names are imported from their modules."""

__all__ = [*sorted(_PUBLIC), "__version__"]

if TYPE_CHECKING:
    from attnlib.backends.base import AttentionBackend as AttentionBackend
    from attnlib.backends.base import AttentionImpl as AttentionImpl
    from attnlib.backends.base import StateImpl as StateImpl
    from attnlib.cache.allocator import BlockAllocator as BlockAllocator
    from attnlib.cache.states import StateCache as StateCache
    from attnlib.cache.storage import PagedKVCache as PagedKVCache
    from attnlib.cache.table import BlockTable as BlockTable
    from attnlib.capabilities import Capabilities as Capabilities
    from attnlib.capabilities import Sizes as Sizes
    from attnlib.capabilities import StateCapabilities as StateCapabilities
    from attnlib.errors import AttnlibError as AttnlibError
    from attnlib.layer import Attention as Attention
    from attnlib.layer import StateLayer as StateLayer
    from attnlib.layer.warmup import warmup as warmup
    from attnlib.metadata.base import AttentionMetadata as AttentionMetadata
    from attnlib.metadata.base import AttentionMetadataBuilder as AttentionMetadataBuilder
    from attnlib.metadata.common import CommonAttentionMetadata as CommonAttentionMetadata
    from attnlib.metadata.state import AttentionState as AttentionState
    from attnlib.selection import explain as explain
    from attnlib.selection import get_attn_backend as get_attn_backend
    from attnlib.selection import list_backends as list_backends
    from attnlib.selection import register_backend as register_backend
    from attnlib.selection import select_for_groups as select_for_groups
    from attnlib.selection import use_backend as use_backend
    from attnlib.spec import AttentionSpec as AttentionSpec
    from attnlib.spec import AttentionType as AttentionType
    from attnlib.spec import CudaGraphSupport as CudaGraphSupport
    from attnlib.spec import MaskKind as MaskKind
    from attnlib.spec import StateSpec as StateSpec
    from attnlib.workspace import BatchLimits as BatchLimits


def _checks() -> Any:
    """What ATTNLIB_VALIDATE=1 checks before each layer call."""
    return import_module("attnlib.debug.validation").check_call_values


def _checks_and_shadow() -> Any:
    """The same for ATTNLIB_VALIDATE=2, which compares every call with `torch`, too."""
    import_module("attnlib.debug.shadow").enable_validation_shadow()
    return _checks()


_VALIDATORS.update({1: _checks, 2: _checks_and_shadow})


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        from difflib import get_close_matches

        nearest = get_close_matches(name, __all__, n=1)
        hint = f"did you mean {nearest[0]!r}? Its" if nearest else "its"
        raise AttributeError(
            f"module 'attnlib' has no attribute {name!r}; {hint} public names are "
            f"{', '.join(__all__)}"
        )
    value = getattr(import_module(module), name)
    globals()[name] = value  # later look-ups do not call this function
    return value


def __dir__() -> list[str]:
    return __all__
