"""M14: the Triton indexer against torch on a GPU, in bfloat16 and over float8 index keys."""

from __future__ import annotations

import pytest
import torch

from attnlib.cache.index_keys import IndexKeyCache
from attnlib.ops.torch import key_indexer as torch_operation
from attnlib.ops.triton import key_indexer as triton_operation
from attnlib.ops.triton.heuristics import index_chunks
from attnlib.sparse.key_selection import KeySelection
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

QUERY_LENS, SEQ_LENS, PADDING = [70, 1, 3, 1], [3000, 9000, 64, 1], 2
SIZE, BLOCK_SIZE = 128, 64

FORMS = {
    "tokens": (64, True, KeySelection(max_blocks=512), 0),
    "tokens, few heads": (5, True, KeySelection(max_blocks=40), 0),
    "blocks of 128": (
        4, False, KeySelection(max_blocks=16, block_size=128, scope="kv_head"), 1,
    ),
    "blocks of 3": (4, False, KeySelection(max_blocks=7, block_size=3, scope="kv_head"), 2),
}  # fmt: skip
"""Name -> index heads, whether they have weights, the form of the lists, local blocks."""


def _lists(
    form: str, stored: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """The lists of torch, of two equal Triton calls, and of one whose workspace is small."""
    heads, weighted, selection, local_blocks = FORMS[form]
    draw = torch.Generator("cuda").manual_seed(0)
    columns = -(-max(SEQ_LENS) // BLOCK_SIZE)
    num_blocks, tokens = len(SEQ_LENS) * columns, sum(QUERY_LENS) + PADDING

    def numbers(*shape: int) -> torch.Tensor:
        if exact:  # scores are exact in float32, and often equal
            return torch.randint(-1, 2, shape, device="cuda", generator=draw).float()
        return torch.randn(*shape, device="cuda", generator=draw)

    cache = IndexKeyCache.allocate(num_blocks, BLOCK_SIZE, SIZE, stored, "cuda")
    keys = numbers(num_blocks * BLOCK_SIZE, SIZE)
    if exact and cache.scales is not None:
        cache.keys.view(torch.uint8).copy_(keys.to(stored).view(torch.uint8).view_as(cache.keys))
        cache.scales.copy_(2.0 ** numbers(num_blocks, BLOCK_SIZE))
    else:
        slots = torch.arange(len(keys), device="cuda")
        cache.write(keys.bfloat16(), slots)
    table = torch.randperm(num_blocks, device="cuda", generator=draw).view(-1, columns).int()
    for row, length in zip(table, SEQ_LENS, strict=True):  # unused keys are NaN
        slots = torch.arange(length, columns * BLOCK_SIZE, device="cuda")
        blocks = row[slots // BLOCK_SIZE].long(), slots % BLOCK_SIZE
        raw = cache.keys.view(torch.uint8 if cache.scales is not None else torch.int16)
        raw[blocks] = 0x7F if cache.scales is not None else 0x7FC0
    query = numbers(tokens, heads, SIZE).bfloat16()
    weights = numbers(tokens, heads) if weighted else None
    starts = torch.tensor([0, *QUERY_LENS], device="cuda").cumsum(0).int()
    shape = (tokens, 1 if weighted else heads, selection.max_blocks)
    found = []
    for operation, most in (
        (torch_operation, None),
        (triton_operation, None),
        (triton_operation, None),
        (triton_operation, 20000),
    ):
        if most is not None:
            monkeypatch.setattr(index_chunks, "_MAX_SCORES", most)
        out = torch.full(shape, 7 + len(found), dtype=torch.int32, device="cuda")
        operation.select_keys(
            query, weights, cache.keys, cache.scales, table, starts,
            torch.tensor(SEQ_LENS, device="cuda").int(), selection, local_blocks=local_blocks,
            max_query_len=max(QUERY_LENS), max_seq_len=max(SEQ_LENS) + 5, out=out,
        )  # fmt: skip
        found.append(out)
    return found


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_lists_of_exact_scores_are_equal(
    form: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M14: ties go to the smallest position, also where the queries are computed in chunks."""
    expected, *found = _lists(form, stored, True, monkeypatch)
    for lists in found:
        assert torch.equal(lists, expected)
    assert (expected[-PADDING:] == -1).all()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_lists_of_random_scores(
    form: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M14: a call twice, and in chunks, gives the same lists; torch, which adds in another order,
    chooses the same blocks, except for a few whose scores are almost equal."""
    expected, first, again, in_chunks = _lists(form, stored, False, monkeypatch)
    assert torch.equal(first, again) and torch.equal(first, in_chunks)
    blocks = -(-max(SEQ_LENS) // FORMS[form][2].block_size)
    chosen = [
        torch.zeros(*lists.shape[:2], blocks + 1, dtype=torch.bool, device="cuda").scatter_(
            2, lists.long() % (blocks + 1), True
        )
        for lists in (expected, first)
    ]
    differ = int((chosen[0] != chosen[1]).sum())
    print(f"{form}: {differ} of {int(chosen[0].sum())} entries differ", flush=True)
    assert differ <= 0.002 * int(chosen[0].sum())
