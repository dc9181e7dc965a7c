"""Count the kernels that Triton would compile while a cache grows by one token per step.

The key of a compilation consists of compile-time arguments and of what Triton specializes on in the
others. A cache of transformers has heads before tokens: the stride of its heads grows with every
token. Nothing is compiled or launched (`recorded_launches`). `python -m
tests.ops.triton.growing_caches` prints a JSON object: operation and head size -> kernels by the
step that first needed them.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from attnlib.ops.triton import (
    append_kv,
    append_rows,
    cache_write,
    merge_states,
    paged_decode,
    paged_prefill,
)
from attnlib.ops.triton.key_indexer import select_keys
from tests.ops.calls import call_operation
from tests.ops.triton.recorded_launches import install, recorded

__all__ = ["HEAD_SIZES", "OPERATIONS"]

HEAD_SIZES = (64, 40, 20)
"""Rows of 20 elements of 16 bits start on a 16-byte boundary for every second number of tokens."""
HEADS, KV_HEADS = 8, 2
STEPS = range(33, 81)
DTYPE = torch.bfloat16


def dynamic_cache(tokens: int, size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """`[1, Hkv, T, D]` of transformers as blocks of one token, `[T, 1, Hkv, D]`."""
    return torch.zeros(1, KV_HEADS, tokens, size, dtype=dtype).permute(2, 0, 1, 3)


def attention(
    tokens: int, size: int, decode: bool, invariant: bool = False, kernels: str = "portable"
) -> None:
    """One row of one token, or the prefill of a whole prompt."""
    rows = 1 if decode else tokens
    query = torch.zeros(rows, HEADS, size, dtype=DTYPE)
    options = {"kernels": kernels, "batch_invariant": invariant, "max_seq_len": tokens}
    if decode and kernels == "portable":
        options["num_splits"] = 1
    call_operation(
        paged_decode.paged_decode if decode else paged_prefill.paged_prefill,
        query,
        dynamic_cache(tokens, size),
        dynamic_cache(tokens, size),
        torch.zeros(1, tokens, dtype=torch.int32),
        torch.tensor([0, rows], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
        max_query_len=1 if decode else 4096,
        scale=0.1,
        out=torch.zeros(rows, HEADS, size, dtype=DTYPE),
        **options,
    )


def write(tokens: int, size: int, dtype: torch.dtype = DTYPE) -> None:
    """Write one token; keys and values come as a slice of the projections of all heads."""
    rows = torch.zeros(1, (tokens + 2) * size, dtype=DTYPE)[:, : KV_HEADS * size]
    new = rows.unflatten(1, (KV_HEADS, size))
    caches = [dynamic_cache(tokens, size, dtype) for _ in range(2)]
    cache_write.write_kv(new, new, *caches, torch.zeros(1, dtype=torch.int64))


def append(tokens: int, size: int) -> None:
    """Append one token to the only request."""
    new = torch.zeros(1, 1, KV_HEADS, size, dtype=DTYPE)
    lengths = torch.tensor([tokens - 1], dtype=torch.int32)
    table = torch.zeros(1, tokens, dtype=torch.int32)
    caches = [dynamic_cache(tokens, size) for _ in range(2)]
    append_kv.append_kv(new, new, *caches, table, lengths, torch.zeros_like(lengths))


def append_row(tokens: int, size: int) -> None:
    """Append one token to buffers of another capacity in every step."""
    new = torch.zeros(1, 1, KV_HEADS, size, dtype=DTYPE).transpose(1, 2)
    buffer = torch.zeros(1, KV_HEADS, tokens, size, dtype=DTYPE)
    append = append_rows.RowAppend(new, new, buffer, buffer)
    append.run(new, new, buffer, buffer, tokens - 1)


def merge(tokens: int, size: int) -> None:
    """Merge states whose heads lie further apart in every step."""
    out = torch.zeros(HEADS, tokens, size, dtype=DTYPE).transpose(0, 1)[:1]
    lse = torch.zeros(1, HEADS)
    merge_states.merge_states(out, lse, out, lse, out, lse)


def index(tokens: int, size: int) -> None:
    """Choose keys of an index cache of one head."""
    from attnlib.key_selection import KeySelection

    cache = torch.zeros(1, tokens, size, dtype=DTYPE).transpose(0, 1)
    select_keys(
        torch.zeros(1, HEADS, size, dtype=DTYPE), torch.zeros(1, HEADS), cache, None,
        torch.zeros(1, tokens, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32), KeySelection(max_blocks=16),
        max_query_len=1, max_seq_len=128, out=torch.zeros(1, 1, 16, dtype=torch.int32),
    )  # fmt: skip


OPERATIONS: dict[str, Callable[[int, int], None]] = {
    "decode": lambda tokens, size: attention(tokens, size, True),
    "prefill": lambda tokens, size: attention(tokens, size, False),
    "invariant decode": lambda tokens, size: attention(tokens, size, True, True),
    "invariant prefill": lambda tokens, size: attention(tokens, size, False, True),
    "Hopper decode": lambda tokens, size: attention(tokens, size, True, kernels="hopper"),
    "Hopper prefill": lambda tokens, size: attention(tokens, size, False, kernels="auto"),
    "write": write,
    "write float8": lambda tokens, size: write(tokens, size, torch.float8_e4m3fn),
    "append": append,
    "append row": append_row,
    "merge": merge,
    "index": index,
}


def first_steps(run: Callable[[int, int], None], size: int) -> dict[int, list[str]]:
    """The kernels that each step is the first to need."""
    known: set[str] = set()
    found: dict[int, list[str]] = {}
    for number, tokens in enumerate(STEPS):
        kernels = {record.kernel for record in recorded(lambda n=tokens: run(n, size))[0]}
        assert kernels, "the operation launched nothing"
        if new := kernels - known:
            found[number] = sorted(name.split()[0] for name in new)
        known |= kernels
    return found


def main() -> None:
    """Count the kernels of every operation; the last line is the result."""
    install()
    found = {
        f"{name} {size}": first_steps(run, size)
        for name, run in OPERATIONS.items()
        for size in HEAD_SIZES
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
