"""Metadata of the `flashinfer_mla` backend: the batch on the host, planned in its first layer.

A plan of FlashInfer's MLA wrapper contains the softmax scale, so layers with equal scales share
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from attnlib.backends._foreign.latents import latent_batch
from attnlib.backends.flashinfer.mla.wrapper import MLAWrapper, find_mla_wrapper
from attnlib.backends.flashinfer.plans import Lease, PageList, WrapperPool, list_pages
from attnlib.backends.flashinfer.wrappers import compiler_errors
from attnlib.device import resolve_device
from attnlib.errors import BackendUnavailableError
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import Workspace

__all__ = ["FlashInferMLAMetadata", "FlashInferMLAMetadataBuilder"]

_WORKSPACE_BYTES = 128 * 1024 * 1024
"""Recommended by FlashInfer, for the partial results of key splits."""


@dataclass(kw_only=True)
class FlashInferMLAMetadata(PagedMetadata):
    """A batch for FlashInfer's MLA wrapper.

    Attributes:
        num_unpadded_tokens: tokens of requests, without padding.
        starts: `[r + 1]` int32 on the CPU, first tokens of the requests with queries; r of R.
        pages: the pages of these requests.
        form: how the installed release is called.
        pool: the wrappers of the builder.
        leases: planned wrappers by softmax scale and, where plans differ, whether there is an LSE.
    """

    num_unpadded_tokens: int
    starts: torch.Tensor
    pages: PageList
    form: MLAWrapper
    pool: WrapperPool
    leases: dict[tuple[float, bool], Lease] = field(default_factory=dict)

    def planned(self, scale: float, lse: bool) -> Any:
        """The wrapper that is planned for this batch and a softmax scale, with or without an LSE.

        Raises:
            BackendUnavailableError: the kernels cannot be compiled; has the compiler's error lines.
        """
        key = (scale, lse and self.form.plans_lse)
        lease = self.leases.get(key)
        if lease is None:
            lease, spec = self.pool.take(), self.spec
            try:
                self.form.plan(
                    lease.wrapper,
                    self.starts,
                    self.pages,
                    lse,
                    num_heads=spec.num_heads,
                    head_dim_ckv=spec.head_size_v,
                    head_dim_kpe=spec.head_size - spec.head_size_v,
                    page_size=spec.block_size,
                    causal=bool(self.causal),
                    sm_scale=scale,
                    q_data_type=spec.dtype,
                    kv_data_type=spec.kv_dtype,
                )
            except Exception as error:
                lines = compiler_errors(error)
                if lines is None:
                    raise
                raise BackendUnavailableError(
                    f"flashinfer's MLA kernels for {spec.dtype} could not be compiled: {lines}. "
                    "Check that nvcc (CUDA_HOME) matches torch's CUDA, or choose another backend"
                ) from error
            lease.planned()
            self.leases[key] = lease
        return lease.wrapper


class FlashInferMLAMetadataBuilder(AttentionMetadataBuilder[FlashInferMLAMetadata]):
    """Lists the pages of a batch on the host.

    Raises:
        BackendUnavailableError: FlashInfer cannot be imported.
    """

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.NEVER

    def __init__(
        self, spec: AttentionSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(spec, device, **kwargs)
        found, problem = find_mla_wrapper(resolve_device(self.device).capability)
        if found is None:
            raise BackendUnavailableError(problem)
        self._form, kernels = found, str(self.config.get("kernels", "auto"))
        self._workspace = Workspace(self.device, _WORKSPACE_BYTES, fixed=True)
        scratch = self._workspace.reserve(0)
        self._pool = WrapperPool(lambda: found.make(scratch, kernels), self.device)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace on the device, without the buffers of each plan (16 MiB)."""
        return self._workspace.num_bytes

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashInferMLAMetadata:
        """The metadata of one batch.

        Raises:
            ContractError: as `latent_batch`.
        """
        common, fields = latent_batch(self, common_attn_metadata, "FlashInfer's MLA wrapper")
        assert common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None
        assert common.block_table_tensor is not None  # checked by paged_fields
        starts = common.query_start_loc_cpu
        present = (common.query_lens_cpu > 0).nonzero()[:, 0]  # others have no rows to compute
        table = common.block_table_tensor
        if len(present) < common.num_reqs:
            table = table[present.to(self.device)]
        lengths = common.seq_lens_cpu[present].numpy()
        return FlashInferMLAMetadata(
            **fields,
            num_unpadded_tokens=int(starts[-1]),
            starts=torch.cat((starts[present], starts[-1:])),
            pages=list_pages(lengths, table, self.spec.block_size),
            form=self._form,
            pool=self._pool,
        )
