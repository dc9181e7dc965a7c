"""The arguments of vLLM's `get_attn_backend`, as a spec. New code passes an `AttentionSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec

__all__ = ["spec_from_vllm_arguments"]


def spec_from_vllm_arguments(
    positional: tuple[Any, ...], keywords: Mapping[str, Any]
) -> AttentionSpec | None:
    """The spec for the arguments of vLLM's `get_attn_backend`.

    Args:
        positional, keywords: `(head_size, dtype, kv_cache_dtype, block_size,
            is_attention_free=False, use_mla=False, has_sink=False)`. Trailing None are ignored.

    Returns:
        A spec with one head, because vLLM does not pass the number of heads; None for a model
        without attention (`is_attention_free`).

    Raises:
        ContractError: `head_size` is not an integer.
    """
    while positional and positional[-1] is None:
        positional = positional[:-1]
    head_size = positional[0] if positional else keywords.get("head_size")
    if not isinstance(head_size, int):
        raise ContractError(
            f"spec={head_size!r} must be an attnlib.AttentionSpec (or an integer head_size, with "
            f"the arguments of vLLM's get_attn_backend)"
        )
    return _spec(*positional, **keywords)


def _spec(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None = "auto",
    block_size: int = 16,
    is_attention_free: bool = False,
    use_mla: bool = False,
    has_sink: bool = False,
) -> AttentionSpec | None:
    if is_attention_free:
        return None
    return AttentionSpec(
        num_heads=1,
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype or "auto",
        block_size=block_size,
        use_mla=use_mla,
        has_sink=has_sink,
    )
