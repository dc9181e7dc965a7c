"""Emulate attention over two key streams (`emulate`) and compare it with float64 arithmetic.

`python -m tests.ops.triton.hopper.emulated_streams CASE...` prints one JSON line per case. It needs
a process that does not interpret Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.entry_stream import EntryStream
from attnlib.ops.triton.hopper import streams_plan
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.two_streams import two_stream_attention
from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from attnlib.testing.batch_spec import BatchSpec, parse_batch
from tests.ops.triton.cross_compile import stub_target
from tests.ops.triton.hopper.emulate import print_cases, run_emulated

__all__ = ["CASES", "emulate_case"]

CASES: dict[str, dict[str, Any]] = {
    "one split": {"batch": "2q1s40", "splits": 1, "counts": (70, 0)},
    "several splits, the last ones without keys": {
        "batch": "q1s300_q2s9", "splits": 3, "counts": (250, 3, 130), "sinks": True,
    },
    "lists": {"batch": "q2s200_q1s5", "splits": 1, "counts": (90, 200, 1), "lists": 96},
    "lists in splits, an uneven number of tiles": {
        "batch": "q1s200_q1s129", "splits": 2, "counts": (300, 64), "lists": 193, "sinks": True,
    },
    "no split without slots, except where lists are shorter than a power of 2": {
        "batch": "q1s200_q1s3", "splits": 4, "used": 3, "counts": (320, 40), "lists": 300,
    },
    "nothing prefetched": {
        "batch": "q1s200_q1s129", "splits": 1, "counts": (300, 64), "early_waves": 0,
    },
    "window to both sides, soft cap": {
        "batch": "q3s150", "splits": 2, "counts": (10, 128, 129),
        "params": {"window": (99, 30), "causal": False, "logits_soft_cap": 20.0},
    },
}  # fmt: skip
"""`counts`: entries that each query token may see. `splits`: at most; `used`: of the launch, where
it has fewer. `lists`: entries of a list, some of them padding. Two rows after the last request have
no list and no blocks."""
HEADS, SIZE = 4, 512


def _pages(
    rows: int, columns: int, block: int, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(A cache of latents, a block table of this many rows)."""
    cache = torch.randn(rows * columns, block, 1, SIZE, generator=draw).bfloat16()
    return cache, torch.randperm(rows * columns, generator=draw).view(rows, columns).int()


def _entry_lists(options: dict[str, Any], draw: torch.Generator) -> SelectedKeys | None:
    """Lists of distinct entries, visible ones and others, with padding."""
    if "lists" not in options:
        return None
    size = options["lists"]
    lists = [torch.randperm(320, generator=draw)[:size] for _ in options["counts"]]
    indices = torch.stack(lists).unsqueeze(1).int()
    indices[torch.rand(indices.shape, generator=draw) < 0.3] = -1
    return SelectedKeys(indices)


def _expected(
    query: torch.Tensor, keys: list[torch.Tensor], params: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and LSEs of query tokens over their keys, which are their values."""
    out, lse = torch.zeros(query.shape, dtype=torch.float64), torch.zeros(query.shape[:2])
    for token, seen in enumerate(keys):
        scores = params.scale * query[token].double() @ seen.double().T
        if params.logits_soft_cap:
            scores = params.logits_soft_cap * torch.tanh(scores / params.logits_soft_cap)
        if params.sinks is not None:
            scores = torch.cat((scores, params.sinks.double()[:, None]), 1)
            seen = torch.cat((seen, torch.zeros_like(seen[:1])))
        lse[token], out[token] = scores.logsumexp(1), scores.softmax(1) @ seen.double()
    return out, lse


def _own_keys(
    lengths: BatchSpec, cache: torch.Tensor, table: torch.Tensor, params: AttentionParams
) -> list[torch.Tensor]:
    """The keys in the window of each query token."""
    found = []
    for request, (queries, length) in enumerate(
        zip(lengths.query_lens, lengths.seq_lens, strict=True)
    ):
        rows = cache[table[request].long()].flatten(0, 2)
        for place in range(length - queries, length):
            end = place + 1 + (0 if params.causal else params.window[1])
            found.append(rows[max(0, place - params.window[0]) : min(end, length)])
    return found


def emulate_case(name: str) -> dict[str, Any]:
    """Emulate a case.

    Returns:
        error: the largest one of an output, relative to the largest output of its row.
        lse_error: the largest one of an LSE.
        padding: whether outputs after the last request are 0 and their LSEs -inf (M6).
        splits: of the launch, over which the slots are divided.
    """
    options, draw = CASES[name], torch.Generator().manual_seed(0)
    lengths, counts = parse_batch(options["batch"]), options["counts"]
    tokens, requests = lengths.num_actual_tokens, lengths.num_reqs
    cache, table = _pages(requests, 20, 16, draw)
    second, entry_table = _pages(tokens, 5, 64, draw)
    lists = _entry_lists(options, draw)
    params = AttentionParams(
        scale=0.05,
        sinks=torch.randn(HEADS, generator=draw) if options.get("sinks") else None,
        **{"window": (127, 0), **options.get("params", {})},
    )
    query = torch.randn(tokens + 2, HEADS, SIZE, generator=draw).bfloat16()
    keys = _own_keys(lengths, cache, table, params)
    for token, count in enumerate(counts):
        seen = torch.arange(count) if lists is None else lists.indices[token, 0].long()
        seen = seen[(seen >= 0) & (seen < count)]
        rows = second[entry_table[token].long()].flatten(0, 2)
        keys[token] = torch.cat((keys[token], rows[seen]))
    expected, expected_lse = _expected(query[:tokens], keys, params)
    selection = None if lists is None else KeySelection(max_blocks=options["lists"])
    entries = EntryStream(
        *(second, second, 1.0, 1.0, entry_table, torch.tensor(counts).int(), max(counts)),
        *(selection, lists),
    )
    out, lse = torch.full_like(query, torch.nan), torch.zeros(tokens + 2, HEADS)
    starts = torch.tensor([0, *lengths.query_lens]).cumsum(0).int()
    with stub_target("sm_90"):
        JITFunction.run, streams_plan.MAX_SPLITS = run_emulated, options["splits"]
        streams_plan._EARLY_WAVES = options.get("early_waves", 1)
        computed = two_stream_attention(
            *(query, cache, cache, table, starts, torch.tensor(lengths.seq_lens).int()),
            *(params, entries),
            out=out,
            lse=lse,
        )
        assert computed
    largest = expected.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    return {
        "error": float(((out[:tokens].double() - expected) / largest).abs().max()),
        "lse_error": float((lse[:tokens] - expected_lse).abs().max()),
        "padding": bool((out[tokens:] == 0).all() and (lse[tokens:] == -torch.inf).all()),
        "splits": [launch.attend.num_splits for launch in LAUNCHES.values()][-1],
    }


if __name__ == "__main__":
    print_cases(CASES, emulate_case)
