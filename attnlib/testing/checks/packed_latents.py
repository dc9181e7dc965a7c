"""A2: packed latents of 656 bytes per token (P14, M12).

The bytes of a write are compared with bytes that integer arithmetic has made, over the whole cache.
Attention is compared with the oracle over the real values of the bytes. Slots outside of all
sequences hold 0xFF in every byte, which are NaN in elements, scales and rotary part. Cases are
unsupported where a backend has no operations on this format (`AttentionBackend.get_operation`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.params import AttentionParams
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare_bits
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.outcome import NotRun, UnsupportedCase
from attnlib.testing.packed_latents import canonical_tokens, pack_tokens, unpack_tokens
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, find_operation

__all__ = ["CHECKS", "LAYER", "attend_packed"]

LAYER: dict[str, object] = {
    "use_mla": True,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_size": 576,
    "head_size_v": 512,
    "scale": 192**-0.5,
    "layout": "ALIASED",
}
_ATTENTION: dict[str, dict[str, object]] = {
    "decode": {"batch": "q1s37_q1s5_q1s90"},
    "mixed": {"batch": "q1s40_q9s23_q0s0_q2s2_pad2", "block_size": 8},
    "splits": {"batch": "q1s300"},
    "window+sinks": {"batch": "q3s40_q1s33", "sliding_window": 9, "sinks": True},
    "soft_cap": {"batch": "q3s40_q1s33", "logits_soft_cap": 3.0},
    "bidirectional": {"batch": "q3s40_q5", "mask": "bidirectional"},
    "chunk": {"batch": "q3s40_q1s33", "attention_chunk_size": 24},
    "no-lse": {"batch": "q1s37_q2s20", "needs_lse": False},
    "5-heads-page-64": {"batch": "q2s70_q1s64", "num_heads": 5, "block_size": 64},
    "tokens": {"batch": "q1s90_q2s44", "key_selection": ("all_heads", 1, 20, 1)},
    "blocks+sinks": {
        "batch": "q1s90_q2s44", "key_selection": ("all_heads", 16, 3, 1), "sinks": True,
    },
}  # fmt: skip
_DTYPES = ("float16", "bfloat16")


def _written(case: Case, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents of a write, and their slots."""
    draw = torch.Generator().manual_seed(case.seed)
    tokens = torch.randn(14, 576, generator=draw).bfloat16().to(case.torch_dtype)
    slots = torch.tensor([3, 17, -1, 8, 0, 30, 5, -1, 21, 22, 4, 9])  # two rows have no slot
    if kind == "small":
        tokens[0, :128], tokens[1] = 0.0, 0.0
        tokens[3, 200:260] *= 2.0**-12
        tokens[4, :512] *= 2.0**-20
        tokens[5, 128:256] = torch.finfo(case.torch_dtype).tiny
    elif kind == "largest":
        tokens[:, :512] = tokens[:, :512].sign() * torch.finfo(case.torch_dtype).max
        tokens[0, :128] /= torch.arange(1, 129)
    elif kind == "nonfinite":
        tokens[0, 130], tokens[1, 5], tokens[3, 511] = torch.nan, torch.inf, -torch.inf
        tokens[4, 300], tokens[4, 301] = torch.inf, torch.nan
    elif kind == "rotary":
        tokens[:, 512:] = torch.randn(14, 64, generator=draw)
    return tokens, slots


def _check_written(target: BackendUnderTest, case: Case, kind: str) -> str:
    write = find_operation(target.backend, "write_packed_latents")
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if kind == "rotary" and interpreted and not target.on_gpu:
        raise NotRun("Triton's interpreter truncates where a GPU rounds to bfloat16")
    tokens, slots = _written(case, kind)
    # Blocks with a gap between them, and rows of a wider tensor (P9).
    pool = torch.full((5, 8 * 656 + 32), 0xFF, dtype=torch.uint8)
    data = pool.to(target.device)[:, : 8 * 656].view(5, 8, 656)
    rows = torch.zeros(len(tokens), 600, dtype=tokens.dtype)
    rows[:, :576] = tokens
    write(rows.to(target.device)[:, :576], data, slots.to(target.device))
    expected = torch.full((5, 8, 656), 0xFF, dtype=torch.uint8)
    kept = slots >= 0
    at = slots[kept] // 8, slots[kept] % 8
    expected[at] = pack_tokens(tokens[: len(slots)][kept])
    found = data.cpu()
    if not bool((found == 0xFF).all(-1)[(expected == 0xFF).all(-1)].all()):
        return f"slots without a token were written (P4) | case: {case}"
    differs = (canonical_tokens(found) != canonical_tokens(expected)).nonzero()
    if len(differs):
        block, offset, byte = differs[0].tolist()
        return (
            f"{len(differs)} bytes differ from the integer reference, first byte {byte} of slot "
            f"{block * 8 + offset}: {int(found[block, offset, byte])} where "
            f"{int(expected[block, offset, byte])} was expected (P14) | case: {case}"
        )
    if kind == "largest" and not bool(unpack_tokens(found[at]).isfinite().all()):
        return f"the largest numbers are not stored as finite ones (P14) | case: {case}"
    return ""


def _packed(step: MaterializedCase, unused: int) -> torch.Tensor:
    """The cache of a step as bytes, and its views replaced by their real values. Slots outside of
    all sequences hold `unused` in every byte."""
    key = step.inputs.cache.key
    size = step.case.block_size
    data = torch.full((*key.shape[:2], 656), unused, dtype=torch.uint8)
    for request, seq_len in enumerate(step.inputs.batch.seq_lens):
        slots = torch.tensor(step.inputs.placement.slots(request, 0, seq_len, size)).long()
        at = slots // size, slots % size
        data[at] = pack_tokens(key[at[0].to(key.device), at[1].to(key.device), 0].cpu())
        real = unpack_tokens(data[at]).to(key)
        key[at[0].to(key.device), at[1].to(key.device), 0] = real
    return data.to(key.device)


def attend_packed(
    target: BackendUnderTest, step: MaterializedCase, data: torch.Tensor
) -> AttentionOutput:
    """Attend to the packed latents `data` [B, N, 656]."""
    attend = find_operation(target.backend, "packed_latent_attention")
    inputs, params, batch = step.inputs, step.params, step.inputs.batch
    out = torch.full_like(inputs.out, torch.nan)
    lse = None
    if step.case.needs_lse:
        lse = torch.full(inputs.query.shape[:2], torch.nan, device=inputs.query.device)
    try:
        attend(
            inputs.query,
            data,
            inputs.block_table,
            inputs.query_start_loc,
            inputs.seq_lens,
            AttentionParams(
                scale=params.scale,
                causal=params.causal,
                window=params.window,
                attention_chunk_size=params.attention_chunk_size,
                logits_soft_cap=params.logits_soft_cap,
                sinks=params.sinks,
            ),
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            out=out,
            lse=lse,
            selection=step.spec.key_selection,
            selected=step.selected_keys(),
        )
    except UnsupportedConfigError as error:
        raise UnsupportedCase([str(error)]) from error
    return AttentionOutput(out, lse)


def _check_attention(target: BackendUnderTest, case: Case) -> str:
    step = case.materialize(target.device)
    data = _packed(step, 0xFF)
    found = attend_packed(target, step, data)
    if error := compare_with_oracle(case, found, target.device, step):
        return error
    again = attend_packed(target, step, data)
    same = compare_bits(again.out, found.out)
    return "" if same.passed else f"the second call differs (M8): {same} | case: {case}"


def _check_unseen(target: BackendUnderTest, case: Case) -> str:
    """Bytes outside of all sequences change no bit (P5)."""
    results = []
    for unused in (0, 0xFF):
        step = case.materialize(target.device)
        results.append(attend_packed(target, step, _packed(step, unused)))
    found = compare_bits(results[1].out, results[0].out)
    return "" if found.passed else f"unused bytes change the result: {found} | case: {case}"


def _check_visible(target: BackendUnderTest, case: Case, place: int, stored: bytes) -> str:
    """A NaN in the last token reaches the row of its request, and no rows of other requests."""
    step = case.materialize(target.device)
    data, size = _packed(step, 0xFF), case.block_size
    last = len(step.inputs.batch.seq_lens) - 1
    slot = step.inputs.placement.slots(last, 0, step.inputs.batch.seq_lens[last], size)[-1]
    values = torch.tensor(list(stored), dtype=torch.uint8, device=data.device)
    data[slot // size, slot % size, place : place + len(stored)] = values
    rows = attend_packed(target, step, data).out
    if not bool(rows[-1].isnan().any(-1).all()):
        return f"a NaN at byte {place} does not reach the row that sees it | case: {case}"
    if bool(rows[:-1].isnan().any()):
        return f"a NaN at byte {place} reaches rows of other requests | case: {case}"
    return ""


_NANS: dict[str, tuple[int, bytes]] = {
    "scale": (512 + 2 * 4, b"\x00\x00\xc0\x7f"),
    "infinite-scale": (512 + 3 * 4, b"\x00\x00\x80\x7f"),
    "element": (200, b"\x7f"),
    "rotary": (528 + 7 * 2, b"\xc0\x7f"),
}
"""Name -> the byte of a token, and what it holds from there on."""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    def case_of(
        name: str, run: Callable[[BackendUnderTest, Case], str], **fields: object
    ) -> CheckCase:
        case = target.case(**{**LAYER, **fields})
        return CheckCase(name, partial(run, target, case), case)

    for kind in ("small", "largest", "nonfinite", "rotary"):
        yield case_of(f"written-{kind}", partial(_check_written, kind=kind))
    for dtype in _DTYPES:
        for kind in ("small",) if target.quick else ("small", "largest"):
            run = partial(_check_written, kind=kind)
            yield case_of(f"written-{kind}-{dtype}", run, dtype=dtype)
    for name, fields in _ATTENTION.items():
        if not target.quick or name in ("mixed", "window+sinks", "tokens"):
            yield case_of(name, _check_attention, **fields)
    for dtype in () if target.quick else _DTYPES:
        yield case_of(dtype, _check_attention, batch="q1s37_q2s20", dtype=dtype)
    yield case_of("unseen", _check_unseen, batch="q1s37_q2s20_q0s5")
    for name, (place, stored) in _NANS.items():
        if not target.quick or name == "scale":
            run = partial(_check_visible, place=place, stored=stored)
            yield case_of(f"visible-{name}", run, batch="q1s37_2q1s20")


CHECKS = (Check("A2", "packed latents of 656 bytes per token", _cases),)
