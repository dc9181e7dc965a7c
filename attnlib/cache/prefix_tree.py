"""Contents of blocks as a tree: a node is the tokens of a block, after all tokens before it.

The path from a root names the exact content of a block, so two different prefixes never match. A
node may have no block: the head of a sequence can be evicted while its tail is still cached, which
is all that layers with a window need.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.ops.addresses import shortened

__all__ = [
    "Label",
    "PrefixHit",
    "PrefixNode",
    "PrefixTree",
    "TokenIds",
    "as_tokens",
    "chunks",
    "token_count",
]

TokenIds = Sequence[int] | torch.Tensor
"""Token ids: a sequence of integers (0-d integer tensors included) or an integer tensor `[T]`."""

Chunk = tuple[int, ...]


class Label(tuple[Any, ...]):
    """The content of a block that holds no tokens, but what belongs to all tokens before it, such
    as a state (T16). It equals equal labels only, and no tokens."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Label) and tuple.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((Label, tuple(self)))


@dataclass(frozen=True)
class PrefixHit:
    """The result of `BlockAllocator.acquire_prefix`.

    Attributes:
        block_ids: blocks that hold the first `num_tokens` tokens; the caller owns one reference
            to each.
        num_tokens: number of cached tokens, a multiple of the block size.
    """

    block_ids: tuple[int, ...]
    num_tokens: int


class PrefixNode:
    """The content of one block.

    Attributes:
        parent: the content before it; None for a root.
        chunk: tokens of the block; () for a root.
        depth: blocks from the start of the sequence to the end of this one.
        root: of its tree.
        key: of a root: what contents depend on besides the tokens.
        block: the block that a lookup finds; None if no block has the content now.
        children: tokens of the next block -> its content.
        linked: whether lookups reach it.
        dead: of a root: its tree was cleared, and nothing may be added.
    """

    __slots__ = (
        "block",
        "children",
        "chunk",
        "dead",
        "depth",
        "key",
        "linked",
        "parent",
        "root",
    )

    def __init__(self, parent: PrefixNode | None, chunk: Chunk = (), key: Hashable = None) -> None:
        self.parent = parent
        self.chunk = chunk
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.root: PrefixNode = self if parent is None else parent.root
        self.key = key
        self.block: int | None = None
        self.children: dict[Chunk, PrefixNode] = {}
        self.linked = self.dead = False

    def block_at(self, chunk: Chunk) -> int | None:
        """The block of the content that follows this one; None if there is none."""
        child = self.children.get(chunk)
        return None if child is None else child.block


class PrefixTree:
    """The nodes that have a block or lead to one; others are unlinked."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, PrefixNode] = {}

    def root(self, key: Hashable) -> PrefixNode:
        """What precedes the first block of sequences with this key.

        Raises:
            ContractError: the key is not hashable.
        """
        try:
            found = self._roots.get(key)
        except TypeError as error:
            raise ContractError(
                f"key={shortened(key)} cannot be looked up ({error}): pass a tuple, a string or "
                "another hashable value"
            ) from None
        return PrefixNode(None, key=key) if found is None else found

    def find(self, contents: Iterable[Chunk], key: Hashable) -> list[PrefixNode]:
        """The nodes of a sequence, as far as there are any; a node may have no block."""
        node, found = self.root(key), []
        for chunk in contents:
            child = node.children.get(chunk)
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def add(self, node: PrefixNode, chunk: Chunk, block: int) -> PrefixNode | None:
        """Add the content that follows a node; `block` is found for it if no other one is.

        Returns:
            The node of the content; None if the tree was cleared since `node` was made.
        """
        if node.root.dead:
            return None
        parent = self._linked(node)
        child = parent.children.get(chunk)
        if child is None:
            child = PrefixNode(parent, chunk)
            self._link(parent, child)
        if child.block is None:
            child.block = block
        return child

    def drop(self, node: PrefixNode) -> None:
        """Take the block of a node away, and unlink what leads to no block any more."""
        node.block = None
        while node.block is None and not node.children:
            node.linked = False
            if node.parent is None:
                self._roots.pop(node.key, None)
                return
            del node.parent.children[node.chunk]
            node = node.parent

    def clear(self) -> None:
        """Forget all contents; nodes that are held elsewhere stay unlinked."""
        for root in self._roots.values():
            root.dead = True
        self._roots.clear()

    def _linked(self, node: PrefixNode) -> PrefixNode:
        """The node of the same content that lookups reach: itself, after linking it again."""
        path = []
        while not node.linked and node.parent is not None:
            path.append(node)
            node = node.parent
        if not node.linked:
            node = self._roots.setdefault(node.key, node)
            node.linked = True
        for missing in reversed(path):
            child = node.children.get(missing.chunk)
            if child is None:
                child = missing
                self._link(node, child)
            node = child
        return node

    @staticmethod
    def _link(parent: PrefixNode, child: PrefixNode) -> None:
        child.parent, child.root, child.linked = parent, parent.root, True
        parent.children[child.chunk] = child


def as_tokens(token_ids: TokenIds) -> tuple[int, ...]:
    """Token ids as Python integers.

    Raises:
        ContractError: they are not integers.
    """
    count = token_count(token_ids)
    return next(chunks(token_ids, count, 0, 1), ()) if count else ()


def token_count(token_ids: TokenIds) -> int:
    """Number of token ids.

    Raises:
        ContractError: they are not a sequence.
    """
    try:
        return len(token_ids)
    except TypeError:
        raise ContractError(
            f"token_ids={shortened(token_ids)} is not a sequence: pass an integer tensor [T] or a "
            "list of integers"
        ) from None


def chunks(token_ids: TokenIds, size: int, first: int, end: int) -> Iterator[Chunk]:
    """The blocks from `first` up to `end` of `size` tokens, as Python integers.

    Integers of all types are converted to `int`: tensors hash by identity, so content that
    contains them would never be found again.

    Raises:
        ContractError: tokens that are not integers.
    """
    begin = first * size
    tokens: Sequence[int]
    if isinstance(token_ids, torch.Tensor):
        if token_ids.dim() != 1 or token_ids.is_floating_point() or token_ids.is_complex():
            raise ContractError(
                f"token_ids is a {token_ids.dtype} tensor of shape {tuple(token_ids.shape)}: pass "
                f"an integer tensor [T] or a sequence of integers"
            )
        tokens, begin = token_ids[begin : end * size].tolist(), 0
    else:
        tokens = token_ids
    try:
        for start in range(begin, begin + (end - first) * size, size):
            yield tuple(map(index, tokens[start : start + size]))
    except TypeError as error:
        raise ContractError(f"token_ids must be integers: {error}") from None
