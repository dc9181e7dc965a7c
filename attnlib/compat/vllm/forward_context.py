"""vLLM's forward context: the metadata of the current batch, for layers that take no argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from attnlib.errors import ContractError

__all__ = ["ForwardContext", "get_forward_context", "set_forward_context"]


@dataclass(frozen=True)
class ForwardContext:
    """What layers read in `forward`.

    Attributes:
        attn_metadata: the metadata of the batch, one object or one per layer name; None in a
            profiling run, in which layers return zeros.
        virtual_engine: index of the cache in `Attention.kv_cache` (pipeline parallelism).
    """

    attn_metadata: object
    virtual_engine: int = 0

    def metadata_of(self, layer_name: str) -> Any:
        """The metadata of one layer.

        Raises:
            ContractError: there is metadata per layer, but none for this one.
        """
        found = self.attn_metadata
        if not isinstance(found, Mapping):
            return found
        if layer_name not in found:
            raise ContractError(
                f"the forward context has metadata of {', '.join(map(str, found))}, but none of "
                f"layer {layer_name!r}: add it, or set the prefix of the layer"
            )
        return found[layer_name]


_context: ContextVar[ForwardContext | None] = ContextVar("attnlib_forward_context", default=None)


@contextmanager
def set_forward_context(
    attn_metadata: object, vllm_config: Any = None, virtual_engine: int = 0, **more: Any
) -> Iterator[ForwardContext]:
    """Within the block, layers use this metadata.

    Args:
        attn_metadata: see `ForwardContext`.
        vllm_config: accepted for vLLM's argument list; not read.
        virtual_engine: see `ForwardContext`.
        more: likewise accepted and not read (`num_tokens`, ...).
    """
    context = ForwardContext(attn_metadata, virtual_engine)
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)


def get_forward_context() -> ForwardContext:
    """The context of the innermost `set_forward_context`.

    Raises:
        ContractError: outside such a block.
    """
    found = _context.get()
    if found is None:
        raise ContractError(
            "no forward context is set: call the layer within `with set_forward_context(metadata):`"
        )
    return found
