"""Kernels of other projects that attnlib has no backend for, as backends to measure.

    attnlib bench 'fp8q-decode-*' --backends triton,benchmarks/gpu/peers.py:Xqa
    attnlib bench 'cov-prefill-1x8k-unpaged' --backends triton,benchmarks/gpu/peers.py:Cudnn

`Xqa` is FlashInfer's XQA decode (`flashinfer.xqa`, from TensorRT-LLM), which the function compiles
at its first use. `Cudnn` is cuDNN's attention through torch, over keys and values without pages.
Over a float8 cache XQA also rounds queries and weights to float8, which is beyond the error budget
of bfloat16 (1.2 to 2 times the limit in 14 rows on an H200), so that it is measured on the cases
`fp8q-*`, which permit that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnlib
from attnlib.device import DeviceInfo
from attnlib.errors import UnsupportedConfigError

__all__ = ["Cudnn", "Xqa"]

_WORKSPACE_BYTES = 256 << 20
_SEMAPHORE_BYTES = 8 << 20


class XqaImpl(attnlib.AttentionImpl):
    """One query token per request over pages of NHD."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Counters return to zero at the end of every call.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        semaphores = torch.zeros(_SEMAPHORE_BYTES, dtype=torch.uint8, device="cuda")
        self._semaphores = semaphores.view(torch.uint32)

    def forward(
        self,
        query: torch.Tensor,
        cache: attnlib.PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        from flashinfer.xqa import xqa

        if metadata.max_query_len > 1:
            raise UnsupportedConfigError(
                f"max_query_len={metadata.max_query_len}: XQA is measured on decodes of one token"
            )
        requests, (heads, size) = metadata.seq_lens.shape[0], query.shape[1:]
        q = query[:requests].reshape(requests, 1, heads, size)
        rows = output[:requests]
        out = rows if rows.is_contiguous() else torch.empty_like(q)
        xqa(
            q, cache.key_cache, cache.value_cache, metadata.block_table,
            metadata.seq_lens.view(requests, 1).view(torch.uint32), out.view(q.shape),
            self._workspace,
            self._semaphores, self.spec.num_kv_heads, cache.block_size,
            q_scale=self.scale * size**0.5, kv_scale=float(cache.k_scale),
        )  # fmt: skip
        if out is not rows:
            rows.copy_(out[:, 0])
        if output.shape[0] > requests:
            output[requests:] = 0  # M6


class Xqa(attnlib.AttentionBackend):
    """Decodes by FlashInfer's XQA."""

    capabilities = attnlib.Capabilities(
        devices=("cuda",),
        min_capability=(9, 0),
        dtypes=(torch.float16, torch.bfloat16),
        kv_cache_dtypes=(torch.float8_e4m3fn,),
        kv_scale_kinds=("tensor",),
        head_sizes=attnlib.Sizes(exactly=(64, 128, 256)),
        group_sizes=attnlib.Sizes(1),
        block_sizes=attnlib.Sizes(exactly=(16, 32, 64, 128)),
        kv_cache_layouts=("NHD",),
        attn_types=(attnlib.AttentionType.DECODER,),
        mask_kinds=(attnlib.MaskKind.CAUSAL,),
        cudagraph=attnlib.CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    )
    get_name = staticmethod(lambda: "xqa")
    get_impl_cls = staticmethod(lambda: XqaImpl)

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """XQA is part of FlashInfer."""
        try:
            import flashinfer.xqa  # noqa: F401  # only whether it is there
        except ImportError as error:
            return [f"flashinfer.xqa cannot be imported: {error}"]
        return []


class CudnnImpl(attnlib.AttentionImpl):
    """One request without a cache."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Always raises: cuDNN through torch reads no pages."""
        raise UnsupportedConfigError("cuDNN through torch reads keys without pages only")

    def forward_unpaged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_unpaged`."""
        starts = metadata.query_start_loc_cpu.tolist()
        output[starts[-1] :] = 0  # M6
        for begin, end in zip(starts, starts[1:], strict=False):
            if begin == end:
                continue
            q, k, v = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                found = scaled_dot_product_attention(
                    q, k, v, is_causal=self.spec.is_causal, scale=self.scale, enable_gqa=True
                )
            output[begin:end] = found[0].transpose(0, 1)


class Cudnn(attnlib.AttentionBackend):
    """Attention without a cache by cuDNN, through torch."""

    capabilities = attnlib.Capabilities(
        devices=("cuda",),
        min_capability=(8, 0),
        dtypes=(torch.float16, torch.bfloat16),
        head_sizes=attnlib.Sizes(exactly=(64, 128)),
        group_sizes=attnlib.Sizes(1),
        block_sizes=attnlib.Sizes(1),
        attn_types=(attnlib.AttentionType.ENCODER_ONLY,),
        mask_kinds=(attnlib.MaskKind.CAUSAL, attnlib.MaskKind.BIDIRECTIONAL),
    )
    get_name = staticmethod(lambda: "cudnn")
    get_impl_cls = staticmethod(lambda: CudnnImpl)
