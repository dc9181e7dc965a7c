"""FlashInfer's wrapper of decode attention over a paged cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnlib.compat.flashinfer.arguments import (
    check_neutral,
    check_tensors,
    integer,
    torch_dtype,
    warn_positional,
)
from attnlib.compat.flashinfer.page import PagedCache, check_list
from attnlib.compat.flashinfer.page_lists import PageLists
from attnlib.compat.flashinfer.plan import LayerForm
from attnlib.compat.flashinfer.run_arguments import RunArguments
from attnlib.compat.flashinfer.wrapper import PagedWrapper
from attnlib.errors import ContractError

__all__ = ["BatchDecodeWithPagedKVCacheWrapper"]

_POSITIONAL = (
    "pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type",
    "o_data_type", "data_type", "sm_scale", "rope_scale", "rope_theta", "non_blocking",
    "block_tables", "seq_lens", "fixed_split_size", "disable_split_kv", "q_len_per_req",
)  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Decode attention over a paged cache with page lists in CSR form.

    Args:
        float_workspace_buffer: its device is the wrapper's; with `use_cuda_graph` it holds the
            block table.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: whether `run` is captured and `plan` is called between replays.
        use_tensor_cores, backend: choose kernels of FlashInfer, not read: attnlib selects.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: with
            `use_cuda_graph`; their sizes bound later plans, their memory is not used.
        jit_args: refused.

    Raises:
        LayoutMismatchError: an unknown layout.
        ValueError: `use_cuda_graph` without the buffers.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        check_neutral(jit_args=jit_args)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self.use_tensor_cores = use_tensor_cores
        self._q_len_per_req = 1

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *positional: Any,
        **options: Any,
    ) -> None:
        """Plan a batch for all layers. Reads the page lists on the host.

        Args:
            indptr: `[R + 1]` int32, first page of each request in `indices`.
            indices: int32, pages of all requests.
            last_page_len: `[R]` int32, tokens of the last page of each request.
            num_qo_heads, num_kv_heads, head_dim, page_size: sizes.
            options: FlashInfer's keyword arguments. Served: `window_left`, `logits_soft_cap`,
                `q_data_type`, `kv_data_type`, `data_type`, `sm_scale`, `q_len_per_req` (causal
                among the new tokens). Not read: `non_blocking`, `block_tables`, `seq_lens`,
                `fixed_split_size`, `disable_split_kv`, `rope_scale`, `rope_theta`. Refused:
                `pos_encoding_mode` other than "NONE", `window_right` other than 0, `o_data_type`
                other than the dtype of q.
            positional: the first of these by position, which FlashInfer deprecates.

        Raises:
            ContractError: the page lists disagree, or exceed the first plan of a CUDA graph.
            UnsupportedConfigError: an option that is not served.
        """
        if positional:
            warn_positional(type(self).__name__)
            if len(positional) > len(_POSITIONAL):
                raise ContractError(
                    f"plan has {len(positional)} optional arguments by position; it takes "
                    f"{len(_POSITIONAL)}: pass them by keyword"
                )
            options = dict(zip(_POSITIONAL, positional, strict=False)) | options
        self._plan_options(
            indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size),
            **options,
        )  # fmt: skip

    begin_forward = plan

    def _plan_options(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        sizes: tuple[int, int, int, int],
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        check_neutral(pos_encoding_mode=pos_encoding_mode, window_right=window_right)
        q_len_per_req = integer("q_len_per_req", q_len_per_req, 1)
        q_dtype = torch_dtype(q_data_type or data_type or "float16")
        if o_data_type is not None and torch_dtype(o_data_type) != q_dtype:
            check_neutral(o_data_type=o_data_type)
        if self._is_fixed and self._plan_ is not None and q_len_per_req != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req={q_len_per_req}, but the first plan with use_cuda_graph=True has "
                f"frozen it at {self._q_len_per_req}"
            )
        check_list("last_page_len", last_page_len)
        count = last_page_len.shape[0] + 1
        queries = torch.arange(count, dtype=torch.int32, device="cpu") * q_len_per_req
        num_qo_heads, num_kv_heads, head_dim, page_size = sizes
        form = LayerForm(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_sizes=(head_dim, head_dim),
            page_size=page_size, causal=True, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, q_data_type=q_dtype,
            kv_data_type=torch_dtype(kv_data_type or data_type or q_dtype),
        )  # fmt: skip
        self._plan_batch(form, PageLists.of(queries, indptr, indices, last_page_len, page_size))
        self._q_len_per_req = q_len_per_req

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of one layer over the planned batch.

        Args:
            q: `[R * q_len_per_req, Hq, D]`.
            paged_kv_cache: `[pages, 2, page_size, Hkv, D]` (NHD) or `[pages, 2, Hkv, page_size, D]`
                (HND), or a pair of tensors without the second dimension.
            q_scale, k_scale, v_scale: factor of the scores; real key and value per stored one.
            out: `[R * q_len_per_req, Hq, D]`, written and returned.
            lse: `[R * q_len_per_req, Hq]` float32, written and returned with `return_lse`.
            return_lse: also return the base-2 LSE.
            enable_pdl: not read.
            window_left, q_len_per_req: None, or the value of `plan`.
            args, sinks, skip_softmax_threshold_scale_factor, kv_cache_sf: refused.

        Returns:
            The output; with `return_lse` a pair with the LSE.

        Raises:
            RuntimeError: there is no plan.
            ValueError: `q` has another number of rows, or a value differs from the plan's.
            ContractError: a shape or dtype does not fit.
            UnsupportedConfigError: an argument that is not served.
        """
        check_neutral(
            args=args, sinks=sinks, kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )  # fmt: skip
        planned = self._q_len_per_req
        if q_len_per_req is not None and integer("q_len_per_req", q_len_per_req, 1) != planned:
            raise ValueError(f"q_len_per_req={q_len_per_req}, but plan has {planned}")
        check_tensors(q=q)
        rows = None if self._plan_ is None else self._plan_.common.num_reqs * planned
        if rows is not None and (q.dim() != 3 or q.shape[0] != rows):
            raise ValueError(
                f"q has {q.shape[0] if q.dim() else 0} rows and {q.dim()} dimensions, but the plan "
                f"has {rows // planned} requests with q_len_per_req={planned}: pass "
                f"[{rows}, heads, head_dim]"
            )
        scales = (q_scale, k_scale, v_scale)
        return self._run(
            RunArguments(q, paged_kv_cache, *scales, out, lse, return_lse, window_left, planned)
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """`run`, deprecated in FlashInfer. `window_left`, `logits_soft_cap` and `sm_scale` replace
        those of `plan`, for later runs too.

        Raises:
            ContractError, UnsupportedConfigError: as `run`.
        """
        check_neutral(pos_encoding_mode=pos_encoding_mode)
        self._override(True, window_left, logits_soft_cap, sm_scale)
        return self.run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            return_lse=return_lse,
        )  # fmt: skip

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
