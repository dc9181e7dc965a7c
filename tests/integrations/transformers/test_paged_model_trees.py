"""Trees of drafts in a `PagedModel` whose layers have windows (M20)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.score_functions.trees import tree_tensor
from tests.integrations.tiny_models import decoder, prompts
from tests.integrations.transformers.test_paged_model import cohere2

BLOCK = 8


@dataclasses.dataclass
class Tree:
    """Tokens, and the parent of each among them; -1 for the root, which is accepted already."""

    tokens: list[int]
    parents: list[int]

    def branch(self, token: int) -> list[int]:
        return [] if token < 0 else [*self.branch(self.parents[token]), token]


class Engine:
    """One request over a `PagedModel`; its blocks are 0, 1, 2 and so on."""

    def __init__(self, model: Any, backend: str) -> None:
        self.paged = PagedModel(model, num_blocks=16, block_size=BLOCK, backend=backend)
        self.length = 0

    def step(self, tree: Tree, as_rows: bool = False) -> torch.Tensor:
        """Run the tokens of a tree behind those that are kept; logits of each."""
        count = len(tree.tokens)
        bias = torch.full((count, count), -torch.inf)
        for token in range(count):
            bias[token, tree.branch(token)] = 0.0
        depths = [len(tree.branch(token)) - 1 for token in range(count)]
        positions = self.length + torch.tensor(depths)
        rows = torch.arange(self.length, self.length + count)
        lens = torch.tensor([self.length + count], dtype=torch.int32)
        starts = torch.tensor([0, count], dtype=torch.int32)
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [count],
            [self.length + count],
            [list(range(16))],
            BLOCK,
            "cpu",
            query_bias=bias,
            score_tensors={
                "tree": tree_tensor(rows if as_rows else positions, starts, lens, count)
            },
        )
        with self.paged.attached():
            return self.paged.step(torch.tensor(tree.tokens), positions, common)

    def keep(self, branch: list[int]) -> None:
        """Keep the tokens of a branch: their keys and values follow those that were kept before."""
        source = torch.tensor([self.length + token for token in branch])
        target = torch.arange(self.length, self.length + len(branch))
        for _, cache in self.paged.layers():
            cache.move_slots(source, target)
        self.length += len(branch)


def chain(tokens: list[int]) -> Tree:
    return Tree(tokens, list(range(-1, len(tokens) - 1)))


def draft(last: int, wanted: list[int], right: int, seed: int) -> Tree:
    """A tree behind `last`: of `wanted` the first `right` tokens, and other ones beside them."""
    generator = torch.Generator().manual_seed(seed)
    tree, parent = Tree([last], [-1]), 0
    for depth, token in enumerate(wanted):
        other = int(torch.randint(1, 60, (), generator=generator))
        siblings = [other] if other != token else []
        if depth < right:
            siblings.append(token)
        for sibling in siblings:
            tree.tokens.append(sibling)
            tree.parents.append(parent)
        if depth >= right:
            break
        parent = len(tree.tokens) - 1
    return tree


def accepted(tree: Tree, logits: torch.Tensor) -> tuple[list[int], int]:
    """The branch that greedy decoding takes, and the token after it."""
    branch = [0]
    while True:
        token = int(logits[branch[-1]].argmax())
        found = [
            child
            for child, parent in enumerate(tree.parents)
            if parent == branch[-1] and tree.tokens[child] == token
        ]
        if not found:
            return branch, token
        branch.append(found[0])


def generated(model: Any, backend: str, prompt: list[int], wanted: list[int]) -> list[int]:
    engine = Engine(model, backend)
    logits = engine.step(chain(prompt))
    engine.keep(list(range(len(prompt))))
    tokens = [int(logits[-1].argmax())]
    for round_ in range(20):
        if len(tokens) >= len(wanted):
            break
        tree = draft(tokens[-1], wanted[len(tokens) : len(tokens) + 4], round_ % 4, round_)
        branch, token = accepted(tree, engine.step(tree))
        engine.keep(branch)
        tokens += [tree.tokens[child] for child in branch[1:]] + [token]
    return tokens[: len(wanted)]


MODELS = {
    "window": cohere2,  # 5, in every other layer
    "window and sinks": lambda: decoder("gpt_oss"),
    "full": lambda: decoder("llama"),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_with_trees_of_drafts(name: str) -> None:
    """Branches of 0 to 3 drafts are accepted; the tokens are those of `generate`."""
    model = MODELS[name]()
    (prompt,) = prompts(13, seed=5)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
        )
    wanted = out[0, len(prompt) :].tolist()
    assert generated(model, "torch", prompt, wanted) == wanted


def test_rows_as_positions_change_the_logits() -> None:
    """The comparison above depends on the positions in the tree."""
    results = []
    for as_rows in (False, True):
        engine = Engine(cohere2(), "torch")
        engine.step(chain([3, 5, 7, 9, 11, 13, 15]))
        engine.keep(list(range(7)))
        results.append(engine.step(Tree([2, 4, 6, 8], [-1, 0, 0, 2]), as_rows))
    assert torch.allclose(results[0][0], results[1][0]) and not torch.allclose(*results)


def test_a_window_needs_positions() -> None:
    engine = Engine(cohere2(), "torch")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [2], [2], [[0]], BLOCK, "cpu", query_bias=torch.zeros(2, 2)
    )
    with pytest.raises(ContractError, match="tree"), engine.paged.attached():
        engine.paged.step(torch.tensor([3, 4]), torch.arange(2), common)
