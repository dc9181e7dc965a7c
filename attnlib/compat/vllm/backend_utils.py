"""vLLM's v1 backend utilities: batch metadata, the builder base class, parameters of layers.

Differences from `attnlib.metadata`, all as in vLLM: `CommonAttentionMetadata` takes ten positional
arguments and fills unused slots of the caller's tensor with -1; builders take
`(kv_cache_spec, vllm_config, device)`; `get_per_layer_parameters` reads the layers from a
`vllm_config`. The other names are those of `attnlib.metadata` and `attnlib.cache.layout`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.cache.layout import (
    get_kv_cache_layout,
    kv_cache_layout_override,
    set_kv_cache_layout,
)
from attnlib.compat.vllm.config import layers_of, spec_of
from attnlib.metadata.base import AttentionMetadataBuilder as Builder
from attnlib.metadata.base import M
from attnlib.metadata.common import CommonAttentionMetadata as Common
from attnlib.metadata.parameters import PerLayerParameters, infer_global_hyperparameters
from attnlib.metadata.parameters import get_per_layer_parameters as parameters_of
from attnlib.metadata.split import (
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
)
from attnlib.metadata.transforms import make_local_attention_virtual_batches
from attnlib.spec import CudaGraphSupport

__all__ = [
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "M",
    "PerLayerParameters",
    "get_kv_cache_layout",
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
    "logger",
    "make_builder",
    "make_local_attention_virtual_batches",
    "reorder_batch_to_split_decodes_and_prefills",
    "set_kv_cache_layout",
    "split_decodes_and_prefills",
]

logger = logging.getLogger("attnlib")


def __getattr__(name: str) -> Any:
    """`_KV_CACHE_LAYOUT_OVERRIDE`, to be read: the present value."""
    if name == "_KV_CACHE_LAYOUT_OVERRIDE":
        return kv_cache_layout_override()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class CommonAttentionMetadata(Common):
    """`attnlib.CommonAttentionMetadata` with vLLM's constructor.

    Args:
        max_seq_len: upper bound of the sequence lengths; None takes the largest of `seq_lens_cpu`.
        more: further fields of `attnlib.CommonAttentionMetadata`.

    The other arguments are fields of that class. Slots at or past `num_actual_tokens` become -1, in
    the caller's tensor.
    """

    def __init__(
        self,
        query_start_loc: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        num_computed_tokens_cpu: torch.Tensor,
        num_reqs: int,
        num_actual_tokens: int,
        max_query_len: int,
        block_table_tensor: torch.Tensor | None,
        slot_mapping: torch.Tensor | None,
        *,
        max_seq_len: int | None = None,
        **more: Any,
    ) -> None:
        if slot_mapping is not None:
            slot_mapping[num_actual_tokens:].fill_(-1)
        if max_seq_len is None:
            max_seq_len = int(seq_lens_cpu.max()) if seq_lens_cpu.numel() else 0
        super().__init__(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc_cpu,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            num_computed_tokens_cpu=num_computed_tokens_cpu,
            num_reqs=num_reqs,
            num_actual_tokens=num_actual_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_table_tensor=block_table_tensor,
            slot_mapping=slot_mapping,
            **more,
        )


class AttentionMetadataBuilder(Builder[M]):
    """Base class of builders with vLLM's constructor; subclasses define `build`.

    Args:
        kv_cache_spec: an `attnlib.AttentionSpec`, or an object with vLLM's fields (`block_size`,
            `num_kv_heads`, `head_size`, `dtype`, `use_mla`, `sliding_window`).
        vllm_config: gives the number of query heads; not read for an `attnlib.AttentionSpec`.
        device: where the batches run.

    A subclass whose batches can all be captured sets `full_cudagraph_supported = True` on the
    class, as in vLLM.
    """

    def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: torch.device) -> None:
        super().__init__(spec_of(kv_cache_spec, vllm_config), device)
        self.vllm_config = vllm_config

    def can_run_in_cudagraph(self, common_attn_metadata: Common) -> bool:
        """False unless `cudagraph_support` or `full_cudagraph_supported` allows it."""
        if self.cudagraph_support is CudaGraphSupport.NEVER:
            return self.full_cudagraph_supported
        return super().can_run_in_cudagraph(common_attn_metadata)


def make_builder(
    backend: type[AttentionBackend], kv_cache_spec: Any, vllm_config: Any, device: Any, **more: Any
) -> Builder[Any]:
    """The builder of a backend of attnlib from vLLM's arguments.

    Args:
        backend: the backend class.
        kv_cache_spec, vllm_config, device: as in `AttentionMetadataBuilder`.
        more: further arguments of the builder (`limits`, ...).
    """
    return backend.make_builder(spec_of(kv_cache_spec, vllm_config), device, **more)


def get_per_layer_parameters(
    vllm_config: Any, cls_: type | None = None
) -> dict[str, PerLayerParameters]:
    """The parameters of every attention layer of a model.

    Args:
        vllm_config: its `compilation_config.static_forward_context` maps names to layers; or such a
            mapping itself.
        cls_: the class that every impl must have; None accepts all.

    Raises:
        UnsupportedConfigError: the impl of a layer is not a `cls_`.
    """
    return parameters_of(layers_of(vllm_config), cls_)
