"""vLLM's v1 backend utilities in plain Python, written from the fourth seed document."""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "M",
    "PerLayerParameters",
    "get_kv_cache_layout",
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
    "logger",
    "make_local_attention_virtual_batches",
    "reorder_batch_to_split_decodes_and_prefills",
    "set_kv_cache_layout",
    "split_decodes_and_prefills",
]

M = TypeVar("M")


class _Logger(logging.Logger):
    def info_once(self, message: str, *arguments: object) -> None:
        """Log a message the first time."""
        if (message, arguments) not in _logged:
            _logged.add((message, arguments))
            self.info(message, *arguments)


_logged: set[tuple[str, tuple[object, ...]]] = set()
logger = _Logger("vllm")
_KV_CACHE_LAYOUT_OVERRIDE = None


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    num_computed_tokens_cpu: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor

    def __post_init__(self) -> None:
        self.slot_mapping[self.num_actual_tokens :] = -1


class AttentionMetadataBuilder(ABC, Generic[M]):
    full_cudagraph_supported: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M: ...

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        return False

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: np.ndarray,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        num_sms: int,
    ) -> bool:
        return False

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        return False


@dataclass
class PerLayerParameters:
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def get_per_layer_parameters(vllm_config: Any, cls_: type) -> dict[str, PerLayerParameters]:
    """Of the layers among the modules of the forward context: those with an impl."""
    found = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if not hasattr(layer, "impl"):
            continue
        assert isinstance(layer.impl, cls_)
        window = getattr(layer.impl, "sliding_window", None)
        cap = getattr(layer.impl, "logits_soft_cap", None)
        left = -1 if window is None else window[0]
        found[name] = PerLayerParameters(left, cap, layer.impl.scale)
    return found


def infer_global_hyperparameters(
    per_layer_params: dict[str, PerLayerParameters],
) -> PerLayerParameters:
    assert per_layer_params
    first = next(iter(per_layer_params.values()))
    assert all(params == first for params in per_layer_params.values())
    return first


@functools.lru_cache
def get_kv_cache_layout() -> str:
    """The override; else the variable; else the layout of a KV connector, NHD without one."""
    if _KV_CACHE_LAYOUT_OVERRIDE is not None:
        return _KV_CACHE_LAYOUT_OVERRIDE
    return os.environ.get("VLLM_KV_CACHE_LAYOUT", "NHD")


def set_kv_cache_layout(cache_layout: str) -> None:
    global _KV_CACHE_LAYOUT_OVERRIDE
    _KV_CACHE_LAYOUT_OVERRIDE = cache_layout


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc_np: np.ndarray,
    seq_lens_np: np.ndarray,
    block_table: Tensor,
    block_size: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """One chunk of one request at a time, instead of arrays."""
    if block_size == 0:
        raise ZeroDivisionError("chunks are divided by the block size")
    assert attn_chunk_size % block_size == 0
    pages, last_column = attn_chunk_size // block_size, block_table.shape[1] - 1
    queries, keys, tables = [], [], []
    for request, length in enumerate(seq_lens_np.tolist()):
        new = int(query_start_loc_np[request + 1] - query_start_loc_np[request])
        position = length - new
        while position < length:
            start = position // attn_chunk_size * attn_chunk_size
            end = min(start + attn_chunk_size, length)
            queries.append(end - position)
            keys.append(end - start)
            columns = [min(start // block_size + page, last_column) for page in range(pages)]
            tables.append(block_table[request, columns])
            position = end
    return (
        np.array(queries, dtype=np.int32),
        np.cumsum([0, *queries]).astype(np.int32),
        np.array(keys, dtype=np.int32),
        torch.stack(tables),
    )


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: Any, scheduler_output: Any, decode_threshold: int = 1
) -> bool:
    """Exchange the last decode that is too far back with the first prefill, and so on."""
    counts = [scheduler_output.num_scheduled_tokens[name] for name in input_batch.req_ids]
    decodes = [i for i, count in enumerate(counts) if count <= decode_threshold]
    prefills = [i for i, count in enumerate(counts) if count > decode_threshold]
    late = [i for i in reversed(decodes) if i >= len(decodes)]
    pairs = list(zip(prefills, late, strict=False))
    for prefill, decode in pairs:
        input_batch.swap_states(prefill, decode)
    return bool(pairs)


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int]:
    common = common_attn_metadata
    lengths = common.query_start_loc_cpu.diff().tolist()
    if common.max_query_len <= decode_threshold:
        return common.num_reqs, 0, common.num_actual_tokens, 0
    kinds = [length > decode_threshold for length in lengths]
    decodes = kinds.index(True) if True in kinds else common.num_reqs
    assert all(kinds[decodes:]) and not any(kinds[:decodes])
    tokens = sum(lengths[:decodes]) if decodes < common.num_reqs else common.num_actual_tokens
    return decodes, common.num_reqs - decodes, tokens, common.num_actual_tokens - tokens
