"""M20: trees of tokens in layers with windows, chunks and ALiBi, compared with their branches."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

import attnlib
from attnlib.errors import ContractError
from attnlib.score_functions import ScoreFunction
from attnlib.score_functions.trees import speculative_tree, tree_tensor
from attnlib.spec import tree_spec

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 16
SPEC = attnlib.AttentionSpec(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32, needs_lse=True
)
LAYERS = {
    "window": SPEC.replace(sliding_window=8),
    "chunks": SPEC.replace(attention_chunk_size=8),
    "alibi": SPEC.replace(has_alibi=True),
    "window and alibi": SPEC.replace(sliding_window=5, has_alibi=True, has_sink=True),
    "no positions": SPEC.replace(logits_soft_cap=4.0),
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.3])


@dataclasses.dataclass
class Tree:
    """New tokens behind a context; `parents[i]` is an earlier token, -1 for the root."""

    context: int
    parents: list[int]

    def branch(self, token: int) -> list[int]:
        """The token and its ancestors among the new tokens, first the root."""
        return [] if token < 0 else [*self.branch(self.parents[token]), token]

    @property
    def positions(self) -> list[int]:
        return [self.context + len(self.branch(i)) - 1 for i in range(len(self.parents))]


def draw_tree(draw: random.Random) -> Tree:
    size = draw.randint(1, 9)
    parents = [-1] + [draw.randint(max(0, i - 4), i - 1) for i in range(1, size)]
    return Tree(draw.choice((0, 1, 7, 8, 9, 30, 45)), parents)


def attend(
    spec: attnlib.AttentionSpec,
    backend: str,
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    query_lens: list[int],
    **fields: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the last `query_lens` rows of each request; (q, k, v) hold all rows."""
    function = spec.score_function
    tensors = {} if function is None else dict.fromkeys(function.layer_tensors, SLOPES)
    layer = attnlib.Attention(
        spec,
        backend=backend,
        device="cpu",
        alibi_slopes=SLOPES if spec.has_alibi else None,
        sinks=SINKS if spec.has_sink else None,
        score_tensors=tensors or None,
    )
    lengths = [len(q) for q, _, _ in rows]
    counts = [-(-length // BLOCK) for length in lengths]
    first = list(itertools.accumulate([0, *counts]))
    table = [list(range(a, b)) for a, b in itertools.pairwise(first)]
    cache = attnlib.PagedKVCache.allocate(spec, num_blocks=first[-1], device="cpu")
    for (_, key, value), blocks, length, new in zip(rows, table, lengths, query_lens, strict=True):
        for position in range(length - new):  # the context
            block, offset = blocks[position // BLOCK], position % BLOCK
            cache.key_cache[block, offset] = key[position]
            cache.value_cache[block, offset] = value[position]
    common = attnlib.CommonAttentionMetadata.from_lengths(
        query_lens, lengths, table, BLOCK, "cpu", **fields
    )
    metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
    new = [
        torch.cat([x[-count:] for x, count in zip(side, query_lens, strict=True)])
        for side in zip(*rows, strict=True)
    ]
    out, lse = layer(*new, cache, metadata, return_lse=True)
    return out.view(-1, HEADS, SIZE), lse


def compare(
    spec: attnlib.AttentionSpec,
    backend: str,
    trees: list[Tree],
    seed: int,
    positions: list[int] | None = None,
) -> None:
    """Compare trees with requests of one branch each, which the torch backend serves."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    rows = [
        tuple(
            torch.randn(tree.context + len(tree.parents), heads, SIZE, generator=generator)
            for heads in shapes
        )
        for tree in trees
    ]
    query_lens = [len(tree.parents) for tree in trees]
    most = max(query_lens)
    bias = torch.full((sum(query_lens), most), -torch.inf)
    for start, tree in zip(itertools.accumulate([0, *query_lens]), trees, strict=False):
        for token in range(len(tree.parents)):
            bias[start + token, tree.branch(token)] = 0.0
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    lens = torch.tensor([len(q) for q, _, _ in rows], dtype=torch.int32)
    given = positions or [p for tree in trees for p in tree.positions]
    in_tree = tree_spec(spec)
    tensors = {"tree": tree_tensor(torch.tensor(given), starts, lens, most)}
    out, lse = attend(
        in_tree,
        backend,
        rows,
        query_lens,
        query_bias=bias,
        score_tensors=tensors if in_tree.score_function else None,
    )
    branches = []
    for tree, sides in zip(trees, rows, strict=True):
        for token in range(len(tree.parents)):
            kept = [*range(tree.context), *(tree.context + i for i in tree.branch(token))]
            branches.append(tuple(x[kept] for x in sides))
    expected, expected_lse = attend(spec, "torch", branches, [1] * len(branches))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_trees_equal_their_branches(name: str) -> None:
    """M20, torch: 200 trees over all layers."""
    draw = random.Random(name)
    for seed in range(4):
        compare(LAYERS[name], "torch", [draw_tree(draw) for _ in range(10)], seed)


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_trees_equal_their_branches_in_kernels(name: str, invariant: bool) -> None:
    """M20, Triton's interpreter: 200 trees over all layers and both kinds of kernels."""
    pytest.importorskip("triton")
    draw = random.Random(name)
    spec = LAYERS[name].replace(batch_invariant=invariant)
    for seed in range(2):
        compare(spec, "triton", [draw_tree(draw) for _ in range(10)], seed)


def test_a_tree_in_kernels() -> None:
    """M20: the tree of the issue: 7 tokens after 44, window of 8."""
    pytest.importorskip("triton")
    compare(LAYERS["window"], "triton", [Tree(44, [-1, 0, 0, 1, 1, 2, 2])], 0)


def test_rows_as_positions_fail() -> None:
    """A window over rows, which is what a layer without a tree computes, is noticed above."""
    tree = Tree(44, [-1, 0, 0, 1, 1, 2, 2])
    with pytest.raises(AssertionError, match="not close"):
        compare(LAYERS["window"], "torch", [tree], 0, positions=list(range(44, 51)))


def test_positions_are_checked() -> None:
    starts, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([10], dtype=torch.int32)
    with pytest.raises(
        ContractError, match="new token 1 of request 0 has position 9.* from 7 to 8"
    ):
        tree_tensor(torch.tensor([7, 9, 8]), starts, lens, 3)
    with pytest.raises(ContractError, match="new token 0 of request 0 has position 6"):
        tree_tensor(torch.tensor([6, 7, 8]), starts, lens, 3)
    with pytest.raises(ContractError, match="pass integers"):
        tree_tensor(torch.tensor([7.0, 8.0, 8.0]), starts, lens, 3)
    for positions, longest in (([7, 8], 3), ([7, 8, 8], 2)):  # the last column stands for others
        with pytest.raises(ContractError, match="pass a position for each token, and at least"):
            tree_tensor(torch.tensor(positions), starts, lens, longest)
    with pytest.raises(ContractError, match="window=2.5 must be an integer"):
        speculative_tree(2.5)
    found = tree_tensor(torch.tensor([7, 8, 8]), starts, lens, 4)
    assert found.tolist() == [[7, 7, 8, 8, 7]] and found.dtype == torch.int32


def test_no_tokens() -> None:
    """M7."""
    nothing = torch.zeros(0, dtype=torch.int64)
    starts, lens = torch.zeros(2, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    assert tree_tensor(nothing, starts, lens, 2).tolist() == [[5, 5, 5]]


def _later(score: object, q_pos: object, k_pos: object, head: object, request: object, aux: object):
    return score - (q_pos - k_pos) * 0.1


def test_specs() -> None:
    """What counts rows is refused beside a bias; `tree_spec` names what it cannot convert."""
    spec = tree_spec(LAYERS["window and alibi"])
    assert spec.score_function == speculative_tree(window=5, has_alibi=True)
    assert spec.sliding_window is None and not spec.has_alibi and spec.has_sink
    assert tree_spec(SPEC).score_function is None
    later = ScoreFunction(_later)
    with pytest.raises(ContractError, match="tree_spec"):
        SPEC.replace(mask_kind="query_bias", sliding_window=8)
    with pytest.raises(ContractError, match="counts positions"):
        tree_spec(SPEC.replace(score_function=later))
    with pytest.raises(ContractError, match="one score function"):
        tree_spec(SPEC.replace(score_function=later, sliding_window=8))
    with pytest.raises(ContractError, match="causal layer"):
        tree_spec(SPEC.replace(mask_kind="bidirectional"))
    with pytest.raises(ContractError, match="window=0"):
        speculative_tree(window=0)
