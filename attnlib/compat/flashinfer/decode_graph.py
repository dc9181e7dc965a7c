"""FlashInfer's decode wrapper for CUDA graphs, under its own name."""

from __future__ import annotations

import torch

from attnlib.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

__all__ = ["CUDAGraphBatchDecodeWithPagedKVCacheWrapper"]


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph=True`.

    Args:
        workspace_buffer: as `float_workspace_buffer` there.
        indptr_buffer, indices_buffer, last_page_len_buffer: as the `paged_kv_*` buffers there.
        kv_layout, use_tensor_cores: as there.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )
