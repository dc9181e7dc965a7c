"""A small FlashInfer-Bench trace set: three kernels of attention, and kernels of other kinds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HQ, HKV, D = 4, 2, 16
DECODE, PAGED, RAGGED = (
    "gqa_paged_decode_h4_kv2_d16_ps1",
    "gqa_paged_prefill_causal_h4_kv2_d16_ps4",
    "gqa_ragged_prefill_causal_h4_kv2_d16",
)

_ATTEND = '''
import math
import torch


def attend(q, k, v, scale, first):
    """(output, base-2 LSE) of queries whose first one is at position `first`."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) * scale
    places = torch.arange(q.shape[0], device=q.device)[:, None, None] + first
    later = torch.arange(k.shape[0], device=q.device) > places
    scores = scores.masked_fill(later, -math.inf)
    lse = torch.logsumexp(scores, -1)
    output = torch.einsum("qhk,khd->qhd", torch.exp(scores - lse[..., None]), v)
    return output.to(q.dtype), (lse / math.log(2)).float()


def concatenated(parts):
    outputs, logs = zip(*parts)
    return torch.cat(outputs), torch.cat(logs)
'''
_PAGED_KEYS = """
def keys(cache, indptr, indices, last, request):
    pages = cache[indices[indptr[request] : indptr[request + 1]].long()].flatten(0, 1)
    return pages[: pages.shape[0] - cache.shape[1] + last]
"""
REFERENCES = {
    DECODE: _ATTEND + _PAGED_KEYS + '''

def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale):
    parts = []
    for r in range(q.shape[0]):
        k, v = (keys(x, kv_indptr, kv_indices, 1, r) for x in (k_cache, v_cache))
        parts.append(attend(q[r : r + 1], k, v, sm_scale, k.shape[0] - 1))
    return concatenated(parts)
''',
    PAGED: _ATTEND + _PAGED_KEYS + '''

def run(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    parts = []
    for r in range(len(qo_indptr) - 1):
        last = int(kv_last_page_len[r])
        k, v = (keys(x, kv_indptr, kv_indices, last, r) for x in (k_cache, v_cache))
        rows = q[qo_indptr[r] : qo_indptr[r + 1]]
        parts.append(attend(rows, k, v, sm_scale, k.shape[0] - rows.shape[0]))
    return concatenated(parts)
''',
    RAGGED: _ATTEND + '''

def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    parts = []
    for r in range(len(qo_indptr) - 1):
        rows, span = q[qo_indptr[r] : qo_indptr[r + 1]], slice(kv_indptr[r], kv_indptr[r + 1])
        parts.append(attend(rows, k[span], v[span], sm_scale, len(k[span]) - len(rows)))
    return concatenated(parts)
''',
}  # fmt: skip
LENGTHS = {DECODE: ([1, 1, 1], [9, 1, 30]), PAGED: ([5, 1], [11, 8]), RAGGED: ([3, 7], [3, 20])}
SCALES = {DECODE: 0.3, PAGED: 0.2, RAGGED: 0.4}
"""Scales of the workloads."""


def _definition(name: str, page: int | None) -> dict[str, Any]:
    const = {"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": D}
    heads = ["num_kv_heads", "head_dim"]
    inputs: dict[str, Any] = {"q": (["total_q", "num_qo_heads", "head_dim"], "float32")}
    if page is None:
        inputs |= {x: (["total_kv", *heads], "float32") for x in ("k", "v")}
        inputs["qo_indptr"] = (["len_indptr"], "int32")
    else:
        const["page_size"] = page
        pages = ["num_pages", "page_size", *heads]
        inputs |= {x: (pages, "float32") for x in ("k_cache", "v_cache")}
        if page > 1:
            inputs["qo_indptr"] = (["len_indptr"], "int32")
    inputs["kv_indptr"] = (["len_indptr"], "int32")
    if page is not None:
        inputs["kv_indices"] = (["num_kv_indices"], "int32")
        if page > 1:
            inputs["kv_last_page_len"] = (["num_requests"], "int32")
    inputs["sm_scale"] = (None, "float32")
    variable = ["total_q", "num_pages", "total_kv", "len_indptr", "num_kv_indices", "num_requests"]
    used = {axis for shape, _ in inputs.values() for axis in shape or ()}
    return {
        "name": name,
        "op_type": "gqa_ragged" if page is None else "gqa_paged",
        "axes": {axis: {"type": "const", "value": size} for axis, size in const.items()}
        | {axis: {"type": "var"} for axis in variable if axis in used},
        "inputs": {x: {"shape": shape, "dtype": dtype} for x, (shape, dtype) in inputs.items()},
        "outputs": {
            "output": {"shape": ["total_q", "num_qo_heads", "head_dim"], "dtype": "float32"},
            "lse": {"shape": ["total_q", "num_qo_heads"], "dtype": "float32"},
        },
        "reference": REFERENCES[name],
    }


def _other(name: str, **inputs: list[str]) -> dict[str, Any]:
    axes = {axis for shape in inputs.values() for axis in shape}
    return {
        "name": name,
        "op_type": "other",
        "axes": {axis: {"type": "var"} for axis in axes},
        "inputs": {x: {"shape": shape, "dtype": "float32"} for x, shape in inputs.items()},
        "outputs": {"output": {"shape": next(iter(inputs.values())), "dtype": "float32"}},
        "reference": "def run(*inputs):\n    return inputs[0]\n",
    }


def tensors(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensor inputs of a workload."""
    draw = torch.Generator().manual_seed(seed)
    queries, keys = LENGTHS[name]
    made = {"q": torch.randn(sum(queries), HQ, D, generator=draw)}
    if name == RAGGED:
        made |= {x: torch.randn(sum(keys), HKV, D, generator=draw) for x in ("k", "v")}
        return made | {"qo_indptr": _indptr(queries), "kv_indptr": _indptr(keys)}
    page = 1 if name == DECODE else 4
    counts = [-(-length // page) for length in keys]
    pool = sum(counts) + 3
    made |= {x: torch.randn(pool, page, HKV, D, generator=draw) for x in ("k_cache", "v_cache")}
    made["kv_indptr"] = _indptr(counts)
    made["kv_indices"] = torch.randperm(pool, generator=draw)[: sum(counts)].int()
    if page > 1:
        made["qo_indptr"] = _indptr(queries)
        tails = [length - (count - 1) * page for length, count in zip(keys, counts, strict=True)]
        made["kv_last_page_len"] = torch.tensor(tails, dtype=torch.int32)
    return made


def _indptr(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def workload(name: str, root: Path, uuid: str, stored: Sequence[str] | None = None) -> str:
    """One line of a workload file; writes the stored tensors (None: all)."""
    made, definition = tensors(name), _definition(name, _page(name))
    kept = {x: tensor for x, tensor in made.items() if stored is None or x in stored}
    blob = f"blob/{name}-{uuid}.safetensors"
    (root / "blob").mkdir(exist_ok=True, parents=True)
    save_file(kept, root / blob)
    inputs: dict[str, Any] = {x: {"type": "random"} for x in definition["inputs"]}
    inputs |= {x: {"type": "safetensors", "path": blob, "tensor_key": x} for x in kept}
    inputs["sm_scale"] = {"type": "scalar", "value": SCALES[name]}
    axes = {
        axis: size
        for x, given in definition["inputs"].items()
        for axis, size in zip(given["shape"] or (), made[x].shape if x in made else (), strict=True)
        if definition["axes"][axis]["type"] == "var"
    }
    return json.dumps(
        {
            "definition": name,
            "workload": {"uuid": uuid, "axes": axes, "inputs": inputs},
            "solution": None,
            "evaluation": None,
        }
    )


def _page(name: str) -> int | None:
    return {DECODE: 1, PAGED: 4, RAGGED: None}[name]


def write_trace_set(root: Path) -> Path:
    """The folder of a trace set with all kernels and one workload each."""
    definitions = {name: _definition(name, _page(name)) for name in (DECODE, PAGED, RAGGED)}
    definitions["mla"] = _other("mla_paged_decode_h16", q_nope=["n"], q_pe=["n"], ckv_cache=["n"])
    definitions["gemm"] = _other("gemm_n64", A=["n"], B=["n"])
    (root / "definitions").mkdir(parents=True)
    for name, data in definitions.items():
        (root / "definitions" / f"{name}.json").write_text(json.dumps(data))
    (root / "workloads" / "gqa").mkdir(parents=True)
    for number, name in enumerate((DECODE, PAGED, RAGGED)):
        lines = [workload(name, root, f"{number:08x}-full")]
        (root / "workloads" / "gqa" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    gemm = {"definition": "gemm_n64", "workload": {"uuid": "1", "axes": {}, "inputs": {}}}
    (root / "workloads" / "gemm.jsonl").write_text(f"{json.dumps(gemm)}\n\n{json.dumps(gemm)}\n")
    return root
