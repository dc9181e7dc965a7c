"""A fake of FlashInfer: the signatures of its wrappers, base-2 LSE, computed by plain torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill

LOG_2 = 0.6931471805599453


class Recorder:
    """The created wrappers, plans and runs, in order."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.plans: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []


def _attend(
    self: Any,
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    out: torch.Tensor,
    lse: Any,
    starts: Any,
) -> None:
    plan = self.planned
    indptr, indices, last = plan["indptr"], plan["indices"], plan["last_page_len"]
    assert indices.dtype == torch.int32 and ((last >= 1) & (last <= plan["page_size"])).all()
    pages = (indptr[1:] - indptr[:-1]).clamp(min=0)
    lengths = torch.where(pages > 0, (pages - 1) * plan["page_size"] + last, 0).to(torch.int32)
    table = torch.full((len(lengths), max(int(pages.max()), 1)), -1, dtype=torch.int32)
    for request, count in enumerate(pages.tolist()):
        table[request, :count] = indices[int(indptr[request]) : int(indptr[request]) + count]
    assert out.is_contiguous(), "FlashInfer's fa2 kernels ignore the strides of the output"
    natural = torch.empty(q.shape[:2])
    params = AttentionParams(
        scale=plan["sm_scale"] * scale,
        causal=plan["causal"],
        window=(plan["window_left"], -1),
        logits_soft_cap=plan["logits_soft_cap"],
    )
    paged_prefill(
        q,
        *caches,
        table,
        starts,
        lengths,
        params,
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        max_seq_len=int(lengths.max()),
        out=out,
        lse=natural,
    )
    if lse is not None:
        lse.copy_(torch.where(torch.isneginf(natural), torch.tensor(-5e4), natural / LOG_2))


def make_module(record: Recorder, *, open_plan: bool = False) -> ModuleType:
    """The module; with `open_plan`, the decode plan has the **kwargs of newer releases."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(
            self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
            use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
            paged_kv_last_page_len_buffer=None, backend="auto", jit_args=None,
        ):  # fmt: skip
            assert (float_workspace_buffer == 0).all(), "the workspace was not zeroed"
            self.backend, self.graph = backend, use_cuda_graph
            self.buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
            record.made.append(self)

        def plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16",
            kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None,
            rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None,
            fixed_split_size=None, disable_split_kv=False,
        ):  # fmt: skip
            assert indptr.device.type == last_page_len.device.type == "cpu"
            self.planned = {
                name: value for name, value in locals().items() if name not in ("record", "self")
            } | {"causal": False}
            if self.graph:
                assert len(last_page_len) == len(self.buffers[2])
                self.buffers[0].copy_(indptr)
                self.buffers[1][: len(indices)].copy_(indices)
                self.buffers[2].copy_(last_page_len)
            record.plans.append(self.planned | {"wrapper": self})

        def run(
            self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
            lse=None, return_lse=False, enable_pdl=None, window_left=None, sinks=None,
            q_len_per_req=1,
        ):  # fmt: skip
            record.runs.append({"wrapper": self, "q": q, "out": out, "lse": lse, "kind": "decode"})
            batch = len(self.planned["last_page_len"])
            if q.shape[0] != batch:
                raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match batch_size ({batch})")
            starts = torch.arange(batch + 1, dtype=torch.int32)
            _attend(
                self,
                q,
                paged_kv_cache,
                q_scale * (k_scale or 1.0),
                out,
                lse if return_lse else None,
                starts,
            )
            if v_scale is not None:
                out *= v_scale
            return (out, lse) if return_lse else out

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(
            self,
            float_workspace_buffer,
            kv_layout="NHD",
            use_cuda_graph=False,
            backend="auto",
            jit_args=None,
        ):
            self.backend = backend
            record.made.append(self)

        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
            packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", sm_scale=None,
            window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
            o_data_type=None, non_blocking=True, seq_lens=None,
        ):  # fmt: skip
            assert (
                qo_indptr.device.type == paged_kv_indptr.device.type == "cpu"
                and int(qo_indptr[0]) == 0
            )
            self.planned = {
                "qo_indptr": qo_indptr,
                "indptr": paged_kv_indptr,
                "indices": paged_kv_indices,
                "last_page_len": paged_kv_last_page_len,
                "page_size": page_size,
                "causal": causal,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale,
                "seq_lens": seq_lens,
            }
            record.plans.append(self.planned | {"wrapper": self})

        def run(
            self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
            lse=None, return_lse=False, lse_base="log2", enable_pdl=None, window_left=None,
            sinks=None,
        ):  # fmt: skip
            record.runs.append(
                {"wrapper": self, "q": q, "out": out, "lse": lse, "kind": self.backend}
            )
            _attend(
                self,
                q,
                paged_kv_cache,
                q_scale * (k_scale or 1.0),
                out,
                lse if return_lse else None,
                self.planned["qo_indptr"],
            )
            if v_scale is not None:
                out *= v_scale
            return (out, lse) if return_lse else out

    if open_plan:
        strict_plan = BatchDecodeWithPagedKVCacheWrapper.plan

        def plan(
            self,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            *deprecated_positional_args,
            **kwargs,
        ):
            strict_plan(
                self,
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                *deprecated_positional_args,
                **kwargs,
            )

        BatchDecodeWithPagedKVCacheWrapper.plan = plan  # type: ignore[method-assign]
    module = ModuleType("flashinfer")
    module.__version__ = "0.6.12"
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return module


def install(monkeypatch: pytest.MonkeyPatch, record: Recorder, **options: Any) -> ModuleType:
    """Add the fake to `sys.modules`."""
    module = make_module(record, **options)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module
