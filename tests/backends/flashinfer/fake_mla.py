"""A fake of FlashInfer's MLA wrapper: its signatures and pitfalls, computed by plain torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill
from tests.backends import fake_flashinfer

__all__ = ["Calls", "install"]


class Calls:
    """The wrappers made, and the plans and runs, in order."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.plans: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Install the fake as `flashinfer.mla` for one test."""
    calls = Calls()

    class BatchMLAPagedAttentionWrapper:
        def __init__(
            self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None,
            kv_indices=None, kv_len_arr=None, backend="auto",
        ):  # fmt: skip
            assert float_workspace_buffer.dtype == torch.uint8
            calls.kernels.append(backend)

        def plan(
            self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
            head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type,
            use_profiler=False,
        ):  # fmt: skip
            for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
                assert tensor.dtype == torch.int32
            assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
            assert (head_dim_ckv, head_dim_kpe) == (512, 64) and int(qo_indptr[0]) == 0
            pages = -(-kv_len_arr // page_size)
            assert torch.equal(kv_indptr[1:] - kv_indptr[:-1], pages.int())
            table = torch.full((len(pages), max(pages.tolist(), default=1)), -1).int()
            for request, count in enumerate(pages.tolist()):
                first = int(kv_indptr[request])
                table[request, :count] = kv_indices[first : first + count]
            self.planned = {
                "starts": qo_indptr, "table": table, "lengths": kv_len_arr, "heads": num_heads,
                "causal": causal, "scale": sm_scale, "dtypes": (q_data_type, kv_data_type),
                "page_size": page_size,
            }  # fmt: skip
            calls.plans.append(self.planned)

        def run(
            self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False,
            profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False,
            o_scale=None,
        ):  # fmt: skip
            """Output [T, Hq, 512] and a base-2 LSE; loads of 16 bytes."""
            plan = self.planned
            assert q_nope.shape[0] == int(plan["starts"][-1])
            assert q_nope.shape[1:] == (plan["heads"], 512) and q_pe.shape[2] == 64
            assert ckv_cache.shape[1:] == (plan["page_size"], 512) and kpe_cache.shape[2] == 64
            assert plan["dtypes"] == (q_nope.dtype, ckv_cache.dtype)
            for tensor in (q_nope, q_pe, ckv_cache, kpe_cache):
                assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])
            assert out.shape == q_nope.shape and out.dtype == q_nope.dtype
            assert not return_lse or (lse.shape == out.shape[:2] and lse.is_contiguous())
            # Only blocks of the batch are copied: a pool may have more than 2^31 elements.
            blocks, table = plan["table"].clamp(min=0).unique(return_inverse=True)
            cache = torch.cat((ckv_cache[blocks], kpe_cache[blocks]), dim=-1)[:, :, None]
            natural = torch.empty(out.shape[:2])
            counts = plan["starts"][1:] - plan["starts"][:-1]
            paged_prefill(
                torch.cat((q_nope, q_pe), dim=-1), cache, cache[..., :512], table.int(),
                plan["starts"], plan["lengths"],
                AttentionParams(scale=plan["scale"], causal=plan["causal"]),
                max_query_len=int(counts.max()), max_seq_len=int(plan["lengths"].max()), out=out,
                lse=natural,
            )  # fmt: skip
            if return_lse:
                lse.copy_(natural if return_lse_base_on_e else natural / fake_flashinfer.LOG_2)
            calls.runs.append({"out": out, "return_lse": return_lse})
            return (out, lse) if return_lse else out

    fake_flashinfer.install(monkeypatch, fake_flashinfer.Recorder())
    module: Any = ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    return calls
