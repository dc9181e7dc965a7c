"""Emulate attention over selected latents (`emulate`) and compare it with the torch operation.

`python -m tests.ops.triton.hopper.emulated_selected CASE...` prints one JSON line per case. It
needs a process that does not interpret Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.selected_attention import selected_attention as torch_attention
from attnlib.ops.triton.hopper import selected_plan
from attnlib.ops.triton.selected_attention import selected_attention
from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from attnlib.testing.batch_spec import parse_batch
from tests.ops.triton.cross_compile import stub_target
from tests.ops.triton.hopper.emulate import print_cases, run_emulated

__all__ = ["CASES", "emulate_case"]

CASES: dict[str, dict[str, Any]] = {
    "4 heads": {"batch": "q2s200_q1s5", "heads": 4, "entries": 90},
    "16 heads, splits, sinks": {
        "batch": "q1s200_q1s129", "heads": 16, "entries": 193, "splits": 2, "sinks": True,
    },
    "16 heads, blocks": {"batch": "q1s200_q2s129", "heads": 16, "entries": 12, "select": 16},
    "64 heads": {"batch": "q2s200_q1s5", "heads": 64, "entries": 90},
    "32 heads, splits, sinks": {
        "batch": "q1s200_q1s129", "heads": 32, "entries": 193, "splits": 2, "sinks": True,
    },
    "96 heads, splits, sinks": {
        "batch": "q1s200_q1s129", "heads": 96, "entries": 193, "splits": 2, "sinks": True,
    },
    "32 heads, blocks, window": {
        "batch": "q1s200_q2s129", "heads": 32, "entries": 12, "select": 16,
        "params": {"window": (99, 0)},
    },
}  # fmt: skip
"""`entries`: of a list, some of them padding; each selects `select` positions. `splits`: of lists.
Two rows after the last request have no list."""
BLOCK = 64


def emulate_case(name: str) -> dict[str, Any]:
    """Emulate a case.

    Returns:
        error: the largest one of an output, relative to the largest output of its row.
        lse_error: the largest one of an LSE.
        padding: whether outputs after the last request are 0 and their LSEs -inf (M6).
    """
    options, draw = CASES[name], torch.Generator().manual_seed(0)
    lengths, heads, select = (
        parse_batch(options["batch"]),
        options["heads"],
        options.get("select", 1),
    )
    tokens, columns = lengths.num_actual_tokens, -(-lengths.max_seq_len // BLOCK)
    num_blocks = lengths.num_reqs * columns
    cache = torch.randn(num_blocks, BLOCK, 1, 576, generator=draw).bfloat16()
    table = torch.randperm(num_blocks, generator=draw).view(-1, columns).int()
    starts = torch.tensor([0, *lengths.query_lens]).cumsum(0).int()
    seq_lens = torch.tensor(lengths.seq_lens).int()
    numbers = -(-lengths.max_seq_len // select) + 3  # some past the ends
    rows = [torch.randperm(numbers, generator=draw)[: options["entries"]] for _ in range(tokens)]
    indices = torch.stack(rows).unsqueeze(1).int()
    indices[torch.rand(indices.shape, generator=draw) < 0.3] = -1
    selection = KeySelection(max_blocks=options["entries"], block_size=select)
    lists = (selection, SelectedKeys(indices))
    query = torch.randn(tokens + 2, heads, 576, generator=draw).bfloat16()
    params = AttentionParams(
        scale=0.05,
        sinks=torch.randn(heads, generator=draw) if options.get("sinks") else None,
        **options.get("params", {}),
    )
    batch = (table, starts, seq_lens, params)
    expected, expected_lse = torch.zeros(tokens, heads, 512), torch.zeros(tokens, heads)
    keys = cache.float()
    torch_attention(
        *(query[:tokens].float(), keys, keys[..., :512], *batch, *lists),
        out=expected,
        lse=expected_lse,
    )
    out = torch.full((tokens + 2, heads, 512), torch.nan, dtype=torch.bfloat16)
    lse = torch.zeros(tokens + 2, heads)
    with stub_target("sm_90"):
        JITFunction.run = run_emulated
        selected_plan.choose_uniform_splits = lambda *_: options.get("splits", 1)
        selected_attention(
            *(query, cache, cache[..., :512], *batch, *lists), out=out, lse=lse, kernels="hopper"
        )
    largest = expected.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    return {
        "error": float(((out[:tokens].float() - expected) / largest).abs().max()),
        "lse_error": float((lse[:tokens] - expected_lse).abs().max()),
        "padding": bool((out[tokens:] == 0).all() and (lse[tokens:] == -torch.inf).all()),
    }


if __name__ == "__main__":
    print_cases(CASES, emulate_case)
