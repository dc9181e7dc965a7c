"""`vllm.attention.selector`: the choice of a backend by sizes and dtypes instead of by a spec."""

from __future__ import annotations

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.selection import get_attn_backend as select

__all__ = ["get_attn_backend"]


def get_attn_backend(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    block_size: int,
    is_attention_free: bool = False,
    use_mla: bool = False,
    has_sink: bool = False,
) -> type[AttentionBackend]:
    """Select the backend of a model; see `attnlib.get_attn_backend`.

    The arguments lack the number of heads, so the answer is that for one head. A layer asks with
    its own.

    Args:
        head_size: D; with `use_mla`, of the latent keys.
        dtype: of the queries.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3", "fp8_e5m2" or the name of a dtype; None is
            "auto".
        block_size: N.
        is_attention_free: the model has no attention. The backend returned builds metadata and
            runs no layer.
        use_mla: multi-head latent attention.
        has_sink: the layers have attention sinks.

    Raises:
        ContractError: an argument is out of range.
        UnsupportedConfigError: the requested backend, or no backend, supports such layers.
    """
    return select(
        head_size, dtype, kv_cache_dtype, block_size, is_attention_free, use_mla, has_sink
    )
