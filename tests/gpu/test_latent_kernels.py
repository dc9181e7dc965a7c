"""The Hopper kernels over latents against the torch operations: decodes and selected latents."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch import packed_latents as torch_packed
from attnlib.ops.torch import paged_decode as torch_decode
from attnlib.ops.torch import paged_prefill as torch_prefill
from attnlib.ops.torch import selected_attention as torch_selected
from attnlib.ops.triton import packed_latents as triton_packed
from attnlib.ops.triton import paged_decode as triton_decode
from attnlib.ops.triton import paged_prefill as triton_prefill
from attnlib.ops.triton import selected_attention as triton_selected
from attnlib.ops.triton.hopper import dispatch, latent_plan
from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from attnlib.testing.batch_spec import BatchSpec, parse_batch
from attnlib.testing.key_selection import make_lists
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

SIZE, SIZE_V = 576, 512
PADDING = 3
"""Query rows after the last request (M6)."""


class Batch(NamedTuple):
    """Tensors of one call; blocks past a request's end hold NaN."""

    query: torch.Tensor
    key: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    params: AttentionParams


def _batch(
    text: str,
    heads: int,
    block_size: int,
    dtype: torch.dtype,
    cache: torch.dtype | None = None,
    **params: Any,
) -> Batch:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels need compute capability 9.0")
    lengths = parse_batch(text)
    draw = torch.Generator("cuda").manual_seed(0)
    columns = -(-lengths.max_seq_len // block_size)
    num_blocks = lengths.num_reqs * columns

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=draw).to(dtype)

    key = random(num_blocks, block_size, 1, SIZE + params.pop("gap", 0))[..., :SIZE]
    order = torch.randperm(num_blocks, device="cuda", generator=draw)
    table = order.view(-1, columns).int()
    positions = torch.arange(columns * block_size, device="cuda").view(columns, block_size, 1, 1)
    for blocks, length in zip(table.long(), lengths.seq_lens, strict=True):
        key[blocks] = torch.where(positions < length, key[blocks], torch.nan)
    if params.pop("sinks", False):
        params["sinks"] = torch.randn(heads, device="cuda", generator=draw)
    return Batch(
        random(lengths.num_actual_tokens + PADDING, heads, SIZE),
        key.to(cache or dtype),
        table,
        torch.tensor([0, *lengths.query_lens], device="cuda").cumsum(0).int(),
        torch.tensor(lengths.seq_lens, device="cuda").int(),
        AttentionParams(scale=192**-0.5, **params),
    )


def _compare(name: str, batch: Batch, run: Any, exact: bool = False) -> None:
    """`run(use_kernel, out, lse)` by torch, with `exact` to a float32 output, and by the kernel."""
    found = []
    for use_kernel in (False, True):
        out = torch.full_like(batch.query[..., :SIZE_V], torch.nan)
        if exact and not use_kernel:
            out = out.float()
        lse = torch.full(batch.query.shape[:2], torch.nan, device="cuda")
        run(use_kernel, out, lse)
        torch.cuda.synchronize()
        found.append((out.float(), lse))
    (expected, expected_lse), (out, lse) = found
    error = float((out - expected).abs().max())
    mean = float((out - expected).abs().mean())
    lse_error = float(torch.where(lse == expected_lse, 0.0, lse - expected_lse).abs().max())
    print(f"{name}: max {error:.2g} mean {mean:.2g} lse {lse_error:.2g}", flush=True)
    assert not out[-PADDING:].any() and (lse[-PADDING:] == -torch.inf).all()  # M6
    assert error < 2e-2 and mean < 1e-3 and lse_error < 2e-3


SELECTED: dict[str, dict[str, Any]] = {
    "64 heads": {"batch": "q37s300", "heads": 64},
    "128 heads, two requests": {"batch": "q5s700_q0s9_q40s1500", "heads": 128},
    "96 heads, splits": {"batch": "q1s9000_q1s4097_q1s130", "heads": 96, "entries": 2048},
    "16 heads, float16, blocks of 16": {
        "batch": "q1s37_q7s20_q200s900", "heads": 16, "block_size": 16, "dtype": torch.float16,
    },
    "16 heads, rising scores": {
        "batch": "80q4s3000", "heads": 16, "entries": 400, "query_scale": 30.0, "sinks": True,
        "no_holes": True,
    },
    "16 heads, rising scores, float16": {
        "batch": "80q4s3000", "heads": 16, "entries": 400, "query_scale": 10.0, "no_holes": True,
        "dtype": torch.float16,
    },
    "16 heads, few tokens, rising scores": {
        "batch": "12q4s3000", "heads": 16, "entries": 400, "query_scale": 30.0, "sinks": True,
    },
    "16 heads, few tokens, rising scores, float16": {
        "batch": "12q4s3000", "heads": 16, "entries": 400, "query_scale": 10.0,
        "dtype": torch.float16,
    },
    "128 heads, rising scores, float16": {
        "batch": "80q4s3000", "heads": 128, "entries": 400, "query_scale": 10.0, "sinks": True,
        "dtype": torch.float16,
    },
    "64 heads, rising scores, float16": {
        "batch": "80q4s3000", "heads": 64, "entries": 400, "query_scale": 10.0, "no_holes": True,
        "dtype": torch.float16,
    },
    "16 heads, many tokens": {"batch": "q3s70_q600s700_q1s40", "heads": 16, "sinks": True},
    "16 heads, many tokens without holes": {
        "batch": "q3s70_q600s700_q1s40", "heads": 16, "sinks": True, "no_holes": True,
    },
    "16 heads, many tokens, window, cap": {
        "batch": "q3s70_q600s700_q1s40", "heads": 16, "no_holes": True, "window": (400, 0),
        "logits_soft_cap": 20.0,
    },
    "5 heads, many tokens without holes, float16": {
        "batch": "q3s70_q600s700_q1s40", "heads": 5, "no_holes": True, "dtype": torch.float16,
    },
    "5 heads, splits, sinks": {"batch": "q1s5000_q2s3000_q1s1", "heads": 5, "sinks": True},
    "64 heads, splits": {"batch": "q1s9000_q1s4097_q1s130", "heads": 64, "entries": 2048},
    "blocks of 64 tokens, window, cap": {
        "batch": "q140s1000_q2s500", "heads": 64, "entries": 7, "select": 64,
        "window": (400, 0), "logits_soft_cap": 20.0,
    },
    "16 heads, splits": {"batch": "q1s9000_q1s4097_q1s130", "heads": 16, "entries": 2048},
    "12 heads, blocks of 64 tokens, window, cap, sinks": {
        "batch": "q140s1000_q2s500", "heads": 12, "entries": 7, "select": 64,
        "window": (400, 0), "logits_soft_cap": 20.0, "sinks": True,
    },
    "3 tokens each, not causal, sinks": {
        "batch": "q150s400", "heads": 32, "entries": 50, "select": 3, "causal": False,
        "sinks": True,
    },
}  # fmt: skip


def _without_holes(indices: torch.Tensor, lengths: BatchSpec) -> torch.Tensor:
    """Lists of tokens with the same visible tokens, and -1 at the end only."""
    pairs = zip(lengths.query_lens, lengths.seq_lens, strict=True)
    own = torch.cat([torch.arange(seq - query, seq) for query, seq in pairs])
    visible = indices <= own.to(indices.device)[:, None, None]
    return indices.where(visible, -1).sort(descending=True).values


@pytest.mark.parametrize("name", SELECTED)
def test_selected_latents(name: str) -> None:
    """M11: lists with -1, in any order, over pages that hold NaN past the end."""
    options = dict(SELECTED[name])
    text, heads = options.pop("batch"), options.pop("heads")
    block_size, dtype = options.pop("block_size", 64), options.pop("dtype", torch.bfloat16)
    selection = KeySelection(
        max_blocks=options.pop("entries", 150), block_size=options.pop("select", 1)
    )
    query_scale, no_holes = options.pop("query_scale", 1.0), options.pop("no_holes", False)
    batch = _batch(text, heads, block_size, dtype, **options)
    batch.query.mul_(query_scale)
    lists = make_lists(selection, parse_batch(text), heads, 1, 1, False).to("cuda")
    if no_holes:
        lists = SelectedKeys(_without_holes(lists.indices, parse_batch(text)))

    def run(use_kernel: bool, out: torch.Tensor, lse: torch.Tensor) -> None:
        operation: Any = triton_selected if use_kernel else torch_selected
        extra = {"kernels": "hopper"} if use_kernel else {}
        operation.selected_attention(
            batch.query, batch.key, batch.key[..., :SIZE_V], batch.table, batch.starts,
            batch.seq_lens, batch.params, selection, SelectedKeys(lists.indices), out=out, lse=lse,
            **extra,
        )  # fmt: skip

    _compare(name, batch, run)


DECODES: dict[str, dict[str, Any]] = {
    "128 heads": {"batch": "3q1s1000", "heads": 128},
    "128 heads, one request": {"batch": "q1s8192", "heads": 128},
    "128 heads, ragged": {"batch": "q1s1_q1s4097_q1s130_q1s64_q1s65", "heads": 128},
    "64 heads, blocks of 16": {"batch": "40q1s777", "heads": 64, "block_size": 16},
    "16 heads, 4 tokens": {"batch": "6q4s900_q2s70", "heads": 16},
    "5 heads, float16, blocks of 256, sinks": {
        "batch": "9q8s500", "heads": 5, "block_size": 256, "dtype": torch.float16, "sinks": True,
    },
    "16 heads": {"batch": "3q1s1000_q1s1", "heads": 16},
    "16 heads, one request": {"batch": "q1s8192", "heads": 16},
    "8 heads, 2 tokens, ragged": {"batch": "q2s2_q1s4097_q2s130_q1s64_q2s65_q2s7000", "heads": 8},
    "5 heads, 3 tokens, float16, blocks of 256, sinks": {
        "batch": "9q3s500_q1s3", "heads": 5, "block_size": 256, "dtype": torch.float16,
        "sinks": True,
    },
    "16 heads, many requests, sinks": {"batch": "300q1s300_q1s2000", "heads": 16, "sinks": True},
    "16 heads, long ranges, ragged": {"batch": "4q1s65000_q1s7_5q1s64999_q1s1", "heads": 16},
    "16 heads, blocks of 16, window, cap": {
        "batch": "7q1s3000_q1s5", "heads": 16, "block_size": 16, "window": (999, 0),
        "logits_soft_cap": 20.0,
    },
    "128 heads, many requests": {"batch": "150q1s300_q1s2000", "heads": 128, "sinks": True},
    "128 heads, rising scores, sinks, float16": {
        "batch": "9q1s3000_q1s64", "heads": 128, "query_scale": 10.0, "sinks": True,
        "dtype": torch.float16,
    },
    "64 heads, rising scores, float16": {
        "batch": "3q1s7000", "heads": 64, "query_scale": 10.0, "dtype": torch.float16,
    },
    "128 heads, blocks of 256": {
        "batch": "9q1s3001_q1s130_2q1s640", "heads": 128, "block_size": 256,
    },
    "128 heads, latents with gaps": {"batch": "9q1s3001_q1s130", "heads": 128, "gap": 64},
    # 36 tiles of a request in 264 ranges of 17 become two parts of 18.
    "16 heads, equal parts of requests": {"batch": "124q1s2304", "heads": 16},
    "128 heads, 2 tokens": {"batch": "32q2s4096", "heads": 128},
    "96 heads, 2 tokens, sinks": {"batch": "9q2s3000_q1s70", "heads": 96, "sinks": True},
    "128 heads, 8 tokens, one request": {"batch": "q8s8192", "heads": 128},
    "32 heads, up to 4 tokens, ragged, blocks of 16": {
        "batch": "q4s4_q1s4097_q4s130_q3s64_q2s65_q4s7000", "heads": 32, "block_size": 16,
    },
    "20 heads, 7 tokens, sinks, float16": {
        "batch": "5q7s3000_q7s7", "heads": 20, "sinks": True, "dtype": torch.float16,
    },
    "16 heads, 8 tokens, window, cap": {
        "batch": "30q8s3000_q8s9", "heads": 16, "window": (999, 0), "logits_soft_cap": 20.0,
    },
    "64 heads, 3 tokens, not causal, rising scores": {
        "batch": "9q3s3000_q3s65", "heads": 64, "query_scale": 10.0, "causal": False,
        "dtype": torch.float16,
    },
    "64 heads, window, cap": {
        "batch": "7q1s3000", "heads": 64, "window": (999, 0), "logits_soft_cap": 20.0,
    },
    "32 heads, ragged, sinks": {
        "batch": "q1s1_q1s4097_q1s130_q1s64_q1s65_40q1s777", "heads": 32, "sinks": True,
    },
    "16 heads, 2 tokens, float16, blocks of 16": {
        "batch": "9q2s3000_q1s64_q2s2", "heads": 16, "block_size": 16, "dtype": torch.float16,
    },
    "11 heads, 2 tokens, window, cap, blocks of 256": {
        "batch": "30q2s3000_q2s9", "heads": 11, "block_size": 256, "window": (999, 0),
        "logits_soft_cap": 20.0,
    },
    "32 heads, long ranges": {"batch": "4q1s65000_q1s7_5q1s64999_q1s1", "heads": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", DECODES)
def test_decode(name: str) -> None:
    """P10, P5, M4 to M6."""
    options = dict(DECODES[name])
    text, heads = options.pop("batch"), options.pop("heads")
    block_size, dtype = options.pop("block_size", 64), options.pop("dtype", torch.bfloat16)
    query_scale = options.pop("query_scale", 1.0)
    batch = _batch(text, heads, block_size, dtype, **options)
    batch.query.mul_(query_scale)
    lengths = parse_batch(text)

    def run(use_kernel: bool, out: torch.Tensor, lse: torch.Tensor) -> None:
        operation: Any = triton_decode if use_kernel else torch_decode
        operation.paged_decode(
            batch.query, batch.key, batch.key[..., :SIZE_V], batch.table, batch.starts,
            batch.seq_lens, batch.params, max_query_len=max(lengths.query_lens),
            max_seq_len=lengths.max_seq_len, out=out, lse=lse, kernels="hopper",
        )  # fmt: skip

    _compare(name, batch, run)


PREFILLS: dict[str, dict[str, Any]] = {
    "128 heads": {"batch": "q200s2000", "heads": 128},
    "128 heads, ragged, sinks": {"batch": "q9s9_q300s300_q0s70_q70s4097_q1s600", "heads": 128,
                                 "sinks": True},
    "128 heads, few blocks": {"batch": "q20s9000_q9s700", "heads": 128},
    "16 heads, prompts": {"batch": "3q700", "heads": 16},
    "16 heads, few blocks over long keys": {"batch": "q100s30000", "heads": 16},
    "5 heads, float16, blocks of 16, window, cap": {
        "batch": "q1700s2000_q9s3000", "heads": 5, "block_size": 16, "dtype": torch.float16,
        "window": (999, 0), "logits_soft_cap": 20.0,
    },
    "64 heads, not causal, e4m3": {
        "batch": "q300s1000_q3s65", "heads": 64, "causal": False, "cache": torch.float8_e4m3fn,
    },
    "32 heads, many requests": {"batch": "40q33s900_q1s7", "heads": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill(name: str) -> None:
    """P10, P5, M4 to M6: with and without splits."""
    options = dict(PREFILLS[name])
    text, heads = options.pop("batch"), options.pop("heads")
    block_size, dtype = options.pop("block_size", 64), options.pop("dtype", torch.bfloat16)
    batch = _batch(text, heads, block_size, dtype, options.pop("cache", None), **options)
    lengths = parse_batch(text)

    def run(use_kernel: bool, out: torch.Tensor, lse: torch.Tensor) -> None:
        operation: Any = triton_prefill if use_kernel else torch_prefill
        operation.paged_prefill(
            batch.query, batch.key, batch.key[..., :SIZE_V], batch.table, batch.starts,
            batch.seq_lens, batch.params, max_query_len=max(lengths.query_lens),
            max_seq_len=lengths.max_seq_len, out=out, lse=lse,
        )  # fmt: skip

    _compare(name, batch, run)


FLOAT8: dict[str, dict[str, Any]] = {
    "16 heads": {"batch": "3q1s1000_q1s1", "heads": 16},
    "16 heads, one request": {"batch": "q1s8192", "heads": 16},
    "8 heads, 2 tokens, ragged": {"batch": "q2s2_q1s4097_q2s130_q1s64_q2s65_q2s7000", "heads": 8},
    "16 heads, many requests, sinks": {"batch": "300q1s300_q1s2000", "heads": 16, "sinks": True},
    "16 heads, long ranges, ragged": {"batch": "4q1s65000_q1s7_5q1s64999_q1s1", "heads": 16},
    "16 heads, equal parts of requests": {"batch": "124q1s2304", "heads": 16},
    "5 heads, 3 tokens, e5m2, float16, blocks of 256, sinks": {
        "batch": "9q3s500_q1s3", "heads": 5, "block_size": 256, "dtype": torch.float16,
        "cache": torch.float8_e5m2, "sinks": True,
    },
    "16 heads, blocks of 16, window, cap": {
        "batch": "7q1s3000_q1s5", "heads": 16, "block_size": 16, "window": (999, 0),
        "logits_soft_cap": 20.0,
    },
    "32 heads, blocks of 16": {"batch": "40q1s777_q1s2", "heads": 32, "block_size": 16},
    "16 heads, 2 tokens, rising scores": {
        "batch": "9q2s3000_q2s65", "heads": 16, "query_scale": 10.0,
    },
    "64 heads, 3 tokens, not causal, rising scores": {
        "batch": "9q3s3000_q3s65", "heads": 64, "query_scale": 10.0, "causal": False,
        "dtype": torch.float16,
    },
    "128 heads, scales, latents with gaps": {
        "batch": "9q1s3001_q1s130", "heads": 128, "gap": 64, "scales": (0.25, 3.0),
    },
    "128 heads, 2 tokens": {"batch": "32q2s4096", "heads": 128},
    "128 heads, many requests": {"batch": "150q1s300_q1s2000", "heads": 128, "sinks": True},
    "32 heads, up to 4 tokens, ragged, blocks of 16": {
        "batch": "q4s4_q1s4097_q4s130_q3s64_q2s65_q4s7000", "heads": 32, "block_size": 16,
    },
    "16 heads, 8 tokens, window, cap": {
        "batch": "30q8s3000_q8s9", "heads": 16, "window": (999, 0), "logits_soft_cap": 20.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_decode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10, M9: decodes over e4m3 and e5m2 by the Hopper kernel."""
    options = dict(FLOAT8[name])
    text, heads = options.pop("batch"), options.pop("heads")
    block_size, dtype = options.pop("block_size", 64), options.pop("dtype", torch.bfloat16)
    cache = options.pop("cache", torch.float8_e4m3fn)
    query_scale, scales = options.pop("query_scale", 1.0), options.pop("scales", None)
    if scales is not None:
        options["k_scale"], options["v_scale"] = torch.tensor(scales, device="cuda").split(1)
    batch = _batch(text, heads, block_size, dtype, cache, **options)
    batch.query.mul_(query_scale)
    lengths = parse_batch(text)
    launched = []
    original = latent_plan.prepare_latent_decode
    monkeypatch.setattr(
        latent_plan,
        "prepare_latent_decode",
        lambda *args, **more: launched.append(True) or original(*args, **more),
    )

    def run(use_kernel: bool, out: torch.Tensor, lse: torch.Tensor) -> None:
        operation: Any = triton_decode if use_kernel else torch_decode
        extra = {"kernels": "hopper"} if use_kernel else {}
        operation.paged_decode(
            batch.query, batch.key, batch.key[..., :SIZE_V], batch.table, batch.starts,
            batch.seq_lens, batch.params, max_query_len=max(lengths.query_lens),
            max_seq_len=lengths.max_seq_len, out=out, lse=lse, **extra,
        )  # fmt: skip

    _compare(name, batch, run)
    assert launched


PACKED: dict[str, dict[str, Any]] = {
    "16 heads": {"batch": "q1s3000_q2s700_q1s1", "heads": 16},
    "128 heads, selected": {"batch": "q1s3000_q40s700", "heads": 128, "entries": 150},
    "5 heads, float16, sinks": {
        "batch": "q7s300", "heads": 5, "dtype": torch.float16, "sinks": True,
    },
    "32 heads, blocks of 16": {"batch": "40q1s777", "heads": 32, "block_size": 16},
    "128 heads, 2 tokens, sinks": {"batch": "32q2s4096", "heads": 128, "sinks": True},
    "16 heads, many requests": {"batch": "300q1s300_q1s2000", "heads": 16},
    "32 heads, up to 4 tokens, ragged, window, cap": {
        "batch": "q4s4_q1s4097_q4s130_q3s64_q2s65_q4s7000", "heads": 32, "window": (999, 0),
        "logits_soft_cap": 20.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_packed_latents(name: str, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """P14, M11, M12: the bytes of the write and the attention, against torch."""
    takes = hopper and not {"entries", "dtype"} & PACKED[name].keys()
    # Warps that convert latents round them to bfloat16, as torch does for such queries.
    exact = takes and "128 heads" not in name and "up to 4" not in name
    served = []

    def run_hopper(*args: Any) -> bool:
        served.append(hopper and original(*args))
        return served[-1]

    original = dispatch.run_packed_latents
    monkeypatch.setattr(dispatch, "run_packed_latents", run_hopper)
    options = dict(PACKED[name])
    text, heads = options.pop("batch"), options.pop("heads")
    entries, dtype = options.pop("entries", 0), options.pop("dtype", torch.bfloat16)
    block_size = options.pop("block_size", 64)
    batch, lengths = _batch(text, heads, block_size, dtype, **options), parse_batch(text)
    latents = torch.where(batch.key.isnan(), 0.0, batch.key).flatten(0, 2)
    slots = torch.arange(latents.shape[0], device="cuda")
    slots[::17] = -1
    stored = []
    for operations in (torch_packed, triton_packed):
        data = torch.full((*batch.key.shape[:2], 656), 0xFF, dtype=torch.uint8, device="cuda")
        operations.write_packed_latents(latents, data, slots)
        stored.append(data)
    assert torch.equal(*stored)
    skipped = torch.arange(0, latents.shape[0], 17, device="cuda")
    triton_packed.write_packed_latents(latents[skipped], stored[0], skipped)
    selection = KeySelection(max_blocks=entries) if entries else None
    lists = make_lists(selection, lengths, heads, 1, 1, False).to("cuda") if selection else None

    def run(use_kernel: bool, out: torch.Tensor, lse: torch.Tensor) -> None:
        operation: Any = triton_packed if use_kernel else torch_packed
        query = batch.query.float() if exact and not use_kernel else batch.query
        operation.packed_latent_attention(
            query, stored[0], batch.table, batch.starts, batch.seq_lens, batch.params,
            max_query_len=max(lengths.query_lens), max_seq_len=lengths.max_seq_len, out=out,
            lse=lse, selection=selection, selected=lists,
        )  # fmt: skip

    _compare(name, batch, run, exact)
    assert not takes or served == [True]
