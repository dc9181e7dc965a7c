"""FlashInfer's wrapper of prefill and append attention over a paged cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnlib.compat.flashinfer.arguments import check_neutral, torch_dtype
from attnlib.compat.flashinfer.page import PagedCache
from attnlib.compat.flashinfer.page_lists import PageLists
from attnlib.compat.flashinfer.plan import LayerForm
from attnlib.compat.flashinfer.run_arguments import RunArguments
from attnlib.compat.flashinfer.wrapper import PagedWrapper

__all__ = ["BatchPrefillWithPagedKVCacheWrapper"]


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Prefill and append attention over a paged cache with page lists in CSR form.

    Args:
        float_workspace_buffer: its device is the wrapper's; with `use_cuda_graph` it holds the
            block table.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: whether `run` is captured and `plan` is called between replays.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf: with
            `use_cuda_graph`; their sizes bound later plans, their memory is not used.
        custom_mask_buf, mask_indptr_buf: not read: `plan` refuses masks.
        backend: chooses kernels of FlashInfer, not read: attnlib selects.
        jit_args, jit_kwargs: refused.

    Raises:
        LayoutMismatchError: an unknown layout.
        ValueError: `use_cuda_graph` without the buffers.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_neutral(jit_args=jit_args, jit_kwargs=jit_kwargs)
        buffers = (
            paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf, qo_indptr_buf,
        )  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan a batch for all layers. Reads the lists on the host.

        Args:
            qo_indptr: `[R + 1]` int32, first query of each request.
            paged_kv_indptr: `[R + 1]` int32, first page of each request in `paged_kv_indices`.
            paged_kv_indices: int32, pages of all requests.
            paged_kv_last_page_len: `[R]` int32, tokens of the last page of each request.
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo: sizes; `head_dim_vo`
                None means `head_dim_qk`.
            causal: causal mask, aligned bottom-right.
            sm_scale: softmax scale; None means `1 / sqrt(head_dim_qk)`.
            window_left: visible keys before a query's own; -1 for all.
            logits_soft_cap: c of `c * tanh(score / c)`; None or 0 for none.
            q_data_type, kv_data_type: dtypes of q and of the cache.
            o_data_type: None, or the dtype of q.
            use_fp16_qk_reduction, non_blocking, seq_lens, seq_lens_q, block_tables: not read.
            max_token_per_sequence, max_sequence_kv, fixed_split_size: not read.
            disable_split_kv, rope_scale, rope_theta, token_pos_in_items_len: not read.
            custom_mask, packed_custom_mask, prefix_len_ptr: refused.
            token_pos_in_items_ptr, max_item_len_ptr: refused.
            pos_encoding_mode: refused unless it is "NONE".

        Raises:
            ContractError: the lists disagree, or exceed the first plan of a CUDA graph.
            UnsupportedConfigError: an argument that is not served.
        """
        check_neutral(
            custom_mask=custom_mask, packed_custom_mask=packed_custom_mask,
            pos_encoding_mode=pos_encoding_mode, prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        q_dtype = torch_dtype(q_data_type)
        if o_data_type is not None and torch_dtype(o_data_type) != q_dtype:
            check_neutral(o_data_type=o_data_type)
        form = LayerForm(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads,
            head_sizes=(head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
            page_size=page_size,
            causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, q_data_type=q_dtype,
            kv_data_type=q_dtype if kv_data_type is None else torch_dtype(kv_data_type),
        )  # fmt: skip
        lists = PageLists.of(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size
        )
        self._plan_batch(form, lists)

    begin_forward = plan

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
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Any:
        """Attention of one layer over the planned batch.

        Args:
            q: `[T, Hq, D]`; rows past the last query of the plan have output 0.
            paged_kv_cache: as in `BatchDecodeWithPagedKVCacheWrapper.run`.
            q_scale: factor of the scores.
            k_scale, v_scale: real key and value per stored one.
            out: `[T, Hq, Dv]`, written and returned.
            lse: `[T, Hq]` float32, written and returned with `return_lse`.
            return_lse: also return the base-2 LSE.
            enable_pdl: not read.
            window_left: None, or the value of `plan`.
            args, sinks, kv_cache_sf, skip_softmax_threshold_scale_factor: refused.

        Returns:
            The output `[T, Hq, Dv]`; with `return_lse` a pair with the LSE.

        Raises:
            RuntimeError: there is no plan.
            ValueError: `window_left` differs from the plan's.
            ContractError: a shape or dtype does not fit.
            UnsupportedConfigError: an argument that is not served.
        """
        check_neutral(
            args=args,
            sinks=sinks,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )
        return self._run(
            RunArguments(
                q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, window_left
            )
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        """`run`, deprecated in FlashInfer. `causal`, `window_left`, `logits_soft_cap` and
        `sm_scale` replace those of `plan`, for later runs too.

        Raises:
            ContractError, UnsupportedConfigError: as `run`.
        """
        check_neutral(pos_encoding_mode=pos_encoding_mode)
        self._override(causal, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
