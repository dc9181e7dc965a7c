"""FlashInfer-Bench solutions that call attnlib: the JSON files, and the functions behind them.

`attnlib bench --workloads TRACE_SET --solutions DIR` writes one file for each definition of GQA
attention. FlashInfer-Bench evaluates it like any other solution, on the backend that attnlib
selects (`ATTNLIB_BACKEND` overrides).
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from attnlib.bench.trace_files import read_definitions
from attnlib.bench.trace_set import Definition
from attnlib.cache.indices import csr_seq_lens, csr_to_block_table
from attnlib.cache.storage import PagedKVCache
from attnlib.compat.flash_attn import flash_attn_varlen_func
from attnlib.errors import ContractError
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, MaskKind

__all__ = ["paged_attention", "ragged_attention", "solution", "write_solutions"]

_LOG2_E = 1.0 / math.log(2.0)
"""FlashInfer-Bench defines the LSE with base 2."""

_SOURCE = '''"""{name}, computed by attnlib."""

from attnlib.bench.solutions import {function}


def run({arguments}):
    output, lse = {function}(
        {keywords},
        causal={causal},
    )
    return {outputs}
'''


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float | torch.Tensor | None = None,
    *,
    qo_indptr: torch.Tensor | None = None,
    kv_last_page_len: torch.Tensor | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GQA attention over pages. Each call plans its batch: it copies the offsets to the host.

    Args:
        q: `[T, Hq, D]`.
        k_cache, v_cache: `[num_pages, page_size, Hkv, D]`.
        kv_indptr: `[R+1]` int32, offsets of the requests in `kv_indices`.
        kv_indices: `[P]` int32, page ids.
        sm_scale: softmax scale; None means 1/sqrt(D).
        qo_indptr: `[R+1]` int32, offsets of the requests in `q`; None means one query each.
        kv_last_page_len: `[R]` int32, tokens in the last page; None means full pages.
        causal: whether a query sees no later key.

    Returns:
        The output `[T, Hq, D]` and the base-2 LSE `[T, Hq]` float32.
    """
    page_size, requests = k_cache.shape[1], kv_indptr.shape[0] - 1
    if kv_last_page_len is None:
        kv_last_page_len = kv_indptr.new_full((requests,), page_size)
    if qo_indptr is None:
        qo_indptr = torch.arange(requests + 1, dtype=torch.int32, device=q.device)
    parts = [requests + 1, requests, requests + 1]
    on_host = torch.cat([kv_indptr, kv_last_page_len, qo_indptr]).cpu()
    kv_starts, last_page_len, query_starts = torch.split(on_host, parts)
    lengths = csr_seq_lens(kv_starts, last_page_len, page_size)
    layer, builder = _layer(
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        q.dtype,
        page_size,
        None if sm_scale is None else float(sm_scale),
        causal,
        q.device,
    )
    common = CommonAttentionMetadata(
        query_start_loc=qo_indptr,
        query_start_loc_cpu=query_starts,
        seq_lens=csr_seq_lens(kv_indptr, kv_last_page_len, page_size),
        seq_lens_cpu=lengths,
        num_reqs=requests,
        num_actual_tokens=q.shape[0],
        max_query_len=_longest(query_starts.diff()),
        max_seq_len=_longest(lengths),
        block_table_tensor=csr_to_block_table(kv_indptr, kv_indices, _longest(kv_starts.diff())),
    )
    cache = PagedKVCache.from_flashinfer((k_cache, v_cache))
    output, lse = layer(q, None, None, cache, builder.build(0, common), return_lse=True)
    return output, lse * _LOG2_E


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float | torch.Tensor | None = None,
    *,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GQA attention over packed keys.

    Args:
        q: `[T, Hq, D]`.
        k, v: `[Tk, Hkv, D]`.
        qo_indptr, kv_indptr: `[R+1]` int32, offsets of the requests in `q` and in `k`.
        sm_scale, causal: as in `paged_attention`.

    Returns:
        As `paged_attention`.
    """
    lengths = torch.stack([qo_indptr, kv_indptr]).cpu().diff(dim=1)
    output, lse, _ = flash_attn_varlen_func(
        q, k, v, qo_indptr, kv_indptr, _longest(lengths[0]), _longest(lengths[1]),
        softmax_scale=None if sm_scale is None else float(sm_scale), causal=causal,
        return_attn_probs=True,
    )  # fmt: skip
    return output, lse.T.contiguous() * _LOG2_E


@lru_cache(maxsize=16)
def _layer(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    block_size: int,
    scale: float | None,
    causal: bool,
    device: torch.device,
) -> tuple[Attention, Any]:
    """A layer and its builder, on the backend that attnlib selects."""
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        block_size=block_size,
        mask_kind=MaskKind.CAUSAL if causal else MaskKind.BIDIRECTIONAL,
        needs_lse=True,
    )
    layer = Attention(spec, scale=scale, device=device)
    return layer, layer.backend.make_builder(spec, device)


def solution(definition: Definition) -> dict[str, Any]:
    """The solution of a definition, in the JSON schema of FlashInfer-Bench.

    Raises:
        ContractError: attnlib does not compute this kernel.
    """
    if reason := definition.unsupported_reason:
        raise ContractError(f"{definition.name} has no solution by attnlib: {reason}")
    source = _SOURCE.format(
        name=definition.name,
        function="paged_attention" if definition.is_paged else "ragged_attention",
        arguments=", ".join(definition.inputs),
        keywords=",\n        ".join(f"{name}={name}" for name in definition.inputs),
        causal=definition.is_causal,
        outputs=", ".join(definition.outputs),
    )
    return {
        "name": f"attnlib_{definition.name}",
        "definition": definition.name,
        "author": "attnlib",
        "description": "Attention by attnlib, on the backend that it selects for this layer.",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda", "cpu"],
            "entry_point": "main.py::run",
            "dependencies": ["attnlib"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": source}],
    }


def write_solutions(trace_set: Path, folder: Path) -> tuple[list[Path], list[str]]:
    """Write the solution of each definition of a trace set that attnlib computes.

    Returns:
        The files, and a line for each definition that is left out.

    Raises:
        ContractError: no trace set.
    """
    written, left_out = [], []
    for definition in read_definitions(trace_set).values():
        if reason := definition.unsupported_reason:
            left_out.append(f"{definition.name}: {reason}")
            continue
        made = solution(definition)
        path = folder / f"{made['name']}.json"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made, indent=2) + "\n")
        written.append(path)
    return written, left_out


def _longest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
