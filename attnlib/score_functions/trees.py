"""Windows, chunks and ALiBi over trees of speculative tokens, whose tokens share positions (M20).

In a tree, several new tokens of a request have one position: the context plus their depth. Rows,
slots and causality count tokens, so a function that needs positions takes them from a batch tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.score_functions.function import ScoreFunction
from attnlib.score_functions.operators import lookup, maximum, minimum, where

__all__ = ["speculative_tree", "tree_position", "tree_tensor"]

_UNBOUNDED = 1 << 30


def tree_position(table: Any, request: Any, position: Any) -> Any:
    """The position of a token in the tree of its request, in a score function.

    Args:
        table: `aux.tree`, the batch tensor of `tree_tensor`.
        request: as given to the score function.
        position: `q_pos` or `k_pos`, which count tokens.
    """
    own = position - lookup(table, request, 0)
    return where(own < 0, position, lookup(table, request, own + 1))


def speculative_tree(
    window: int | None = None, chunk_size: int | None = None, has_alibi: bool = False
) -> ScoreFunction:
    """The window, the chunks or ALiBi of a layer, by the positions of a tree of tokens.

    Batch tensor `tree` `[R, 1 + m]` (`tree_tensor`). With `has_alibi`, layer tensor `slope` `[Hq]`
    float32, the ALiBi slopes. The layer has `mask_kind="query_bias"`, whose bias hides the other
    branches, and none of these features itself (`attnlib.spec.tree_spec` makes such a spec).

    Args:
        window: number of visible keys, including the query's own; None for all.
        chunk_size: positions per attention chunk; None for no chunks.
        has_alibi: add ALiBi.

    Raises:
        ContractError: a size is not an integer of at least 1, or too large.
    """
    constants = {"window": window or _UNBOUNDED, "chunk": chunk_size or _UNBOUNDED}
    for name, size in (("window", window), ("chunk_size", chunk_size)):
        if size is not None and (type(size) is not int or not 0 < size <= _UNBOUNDED):
            raise ContractError(
                f"{name}={size} must be an integer from 1 to {_UNBOUNDED}, or None for none",
                rule="M20",
            )
    return ScoreFunction(
        _tree_with_alibi if has_alibi else _tree,
        constants=tuple(constants.items()),
        layer_tensors=("slope",) if has_alibi else (),
        batch_tensors=("tree",),
        bounds=_changed_bounds if has_alibi else _bounds,
        examples=_examples_with_slopes if has_alibi else _examples,
        in_tree=True,
    )


def _tree(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    query = tree_position(aux.tree, request, q_pos)
    key = tree_position(aux.tree, request, k_pos)
    visible = (query - key < aux.window) & (key // aux.chunk == query // aux.chunk)
    return where(visible, score, float("-inf"))


def _tree_with_alibi(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    query = tree_position(aux.tree, request, q_pos)
    key = tree_position(aux.tree, request, k_pos)
    visible = (query - key < aux.window) & (key // aux.chunk == query // aux.chunk)
    biased = score - lookup(aux.slope, head) * abs(query - key)
    return where(visible, biased, float("-inf"))


def _first_visible(q_first: Any, request: Any, aux: Any) -> Any:
    """The first key that a query of the rows from `q_first` on may see: no token of a tree is
    before the context."""
    least = minimum(q_first, lookup(aux.tree, request, 0))
    return maximum(least - aux.window + 1, least // aux.chunk * aux.chunk)


def _bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    # Positions of new tokens are from the context to their row; only keys of the context have the
    # position of their row.
    context = lookup(aux.tree, request, 0)
    same_first = maximum(q_last - aux.window + 1, q_last // aux.chunk * aux.chunk)
    same_last = minimum(context, (minimum(q_first, context) // aux.chunk + 1) * aux.chunk)
    return _first_visible(q_first, request, aux), seq_len, same_first, same_last


def _changed_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    return _first_visible(q_first, request, aux), seq_len, 0, 0


def tree_tensor(
    positions: Tensor, query_start_loc: Tensor, seq_lens: Tensor, max_query_len: int
) -> Tensor:
    """The batch tensor `tree` of `speculative_tree`; no synchronization on a GPU.

    Args:
        positions: `[T]` integers, of each new token: the number of tokens before it in its branch,
            from the context of the request to the token's row `seq_len - query_len + i`.
        query_start_loc, seq_lens: `[R + 1]` and `[R]` int32 of the batch, on the same device.
        max_query_len: at least the longest query; a batch does not know the width that it needs.

    Returns:
        `[R, 1 + max_query_len]` int32: tokens of the context, then the positions of the new tokens.

    Raises:
        ContractError: another shape or device; on a CPU, a position outside these limits, fewer
            positions than tokens, or a longer query.
    """
    if positions.dim() != 1 or positions.dtype.is_floating_point:
        raise ContractError(
            f"positions are {positions.dtype} {tuple(positions.shape)}; pass integers [T], one for "
            "each new token",
            rule="M20",
        )
    if not positions.device == query_start_loc.device == seq_lens.device:
        raise ContractError(
            f"positions are on {positions.device}, query_start_loc on {query_start_loc.device} and "
            f"seq_lens on {seq_lens.device}; move them to one device",
            rule="M20",
        )
    starts, lens = query_start_loc[:-1], query_start_loc.diff()
    if positions.device.type == "cpu":
        _check_sizes(len(positions), query_start_loc, max_query_len)
    context = (seq_lens - lens).unsqueeze(1)
    own = torch.arange(max_query_len, device=positions.device)
    rows = (starts.unsqueeze(1) + own).clamp(max=max(len(positions) - 1, 0)).long()
    found = positions[rows] if len(positions) else rows.new_zeros(rows.shape)
    exists = own < lens.unsqueeze(1)
    if positions.device.type == "cpu":
        _check_positions(found, context, own, exists)
    found = torch.where(exists, found, context)
    return torch.cat([context, found], 1).to(torch.int32)


def _check_sizes(given: int, query_start_loc: Tensor, max_query_len: int) -> None:
    longest = max(query_start_loc.diff().tolist(), default=0)
    if given < int(query_start_loc[-1]) or max_query_len < longest:
        raise ContractError(
            f"{given} positions for {int(query_start_loc[-1])} new tokens, and max_query_len="
            f"{max_query_len} for queries of up to {longest}: pass a position for each token, and "
            "at least the longest query",
            rule="M20",
        )


def _check_positions(found: Tensor, context: Tensor, own: Tensor, exists: Tensor) -> None:
    wrong = ((found < context) | (found > context + own)) & exists
    if wrong.any():
        request, token = wrong.nonzero()[0].tolist()
        first = int(context[request])
        raise ContractError(
            f"positions: new token {token} of request {request} has position "
            f"{int(found[request, token])}; a tree over a context of {first} tokens gives it one "
            f"from {first} to {first + token}",
            rule="M20",
        )


def _examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    """Every second new token has the position of the one before it."""
    size = (len(seq_lens), 1 + max(seq_lens, default=1))
    table = torch.zeros(size, dtype=torch.int32, device="cpu")
    for request, length in enumerate(seq_lens):
        context = length // 2
        table[request, 0] = context
        table[request, 1:] = context + torch.arange(1, table.shape[1], device="cpu") // 2
    return {"tree": table}


def _examples_with_slopes(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    heads = torch.arange(1, num_heads + 1, dtype=torch.float32, device="cpu")
    slopes = 2.0 ** (-8.0 * heads / num_heads)
    return {"slope": slopes, **_examples(num_heads, seq_lens)}
