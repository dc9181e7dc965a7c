"""A plug-in of SGLang: its backend `fa3` runs the build of FlashAttention 3 that vLLM brings.

SGLang's own build is a gigabyte, which not every machine can take. Both have the same operation;
vLLM's has no chunks, sparse masks or queries without keys. FLASH_ATTENTION_3 is the path of vLLM's
library, `vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`. `sglang_tokens.py` and `sglang_throughput.py`
use the plug-in if this variable is set.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch

__all__ = ["LIBRARY", "register"]

LIBRARY = "FLASH_ATTENTION_3"
"""The environment variable."""

_ABSENT = ("attention_chunk", "sparse_mask_fine", "only_qv")
_FORWARD = (
    "q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k",
    "cu_seqlens_k_new", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table",
    "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale",
    "k_descale", "v_descale", "softmax_scale", "is_causal", "window_left", "window_right",
    "attention_chunk", "softcap", "is_rotary_interleaved", "scheduler_metadata", "num_splits",
    "pack_gqa", "sm_margin", "sinks", "sparse_mask_fine", "only_qv",
)  # fmt: skip
"""Arguments of SGLang's operation in their order."""
_SCHEDULE = (
    "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim",
    "headdim_v", "dtype", "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new",
    "seqused_q", "leftpad_k", "page_size", "max_seqlen_k_new", "is_causal", "window_left",
    "window_right", "attention_chunk", "has_softcap", "num_splits", "pack_gqa", "sm_margin",
)  # fmt: skip


def _arguments(names: tuple[str, ...], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Arguments by name, without those that vLLM's build lacks."""
    values = {**dict(zip(names, given, strict=False)), **named}
    for name in _ABSENT:
        if values.pop(name, None):
            raise NotImplementedError(f"vLLM's build of FlashAttention 3 has no {name}")
    return values


def _forward(*given: Any, **named: Any) -> Any:
    values = _arguments(_FORWARD, given, named)
    table = values["page_table"]
    if values["max_seqlen_k"] is None and table is not None:
        values["max_seqlen_k"] = table.shape[1] * values["k"].shape[1]
    # The last three: decode context parallelism of one rank.
    return torch.ops._vllm_fa3_C.fwd(*values.values(), 1, 0, None)


def _schedule(*given: Any, **named: Any) -> Any:
    from sglang.srt.server_args import get_global_server_args

    values = _arguments(_SCHEDULE, given, named)
    # SGLang captures with one key per request. In vLLM's build the form of a schedule depends on
    # this bound, and must be that of `_forward`, which has the width of the page table.
    longest = get_global_server_args().context_length or 0
    values["max_seqlen_k"] = max(values["max_seqlen_k"], longest)
    return torch.ops._vllm_fa3_C.get_scheduler_metadata(*values.values())


def register() -> None:
    """Provide `sgl_kernel.flash_ops`, which SGLang imports for its operations."""
    import sgl_kernel

    torch.ops.load_library(os.environ[LIBRARY])
    operations = types.SimpleNamespace(default=_forward)
    torch.ops.sgl_kernel.fwd = operations  # type: ignore[attr-defined]
    torch.ops.sgl_kernel.get_scheduler_metadata = _schedule  # type: ignore[attr-defined]
    module = types.ModuleType("sgl_kernel.flash_ops")
    sys.modules[module.__name__] = sgl_kernel.flash_ops = module
