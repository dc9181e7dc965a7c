"""Prefixes that requests of a batch share: leading blocks that are the same in the block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count, as_id

__all__ = [
    "SharedPrefix",
    "check_shared_blocks",
    "check_shared_prefixes",
    "find_shared_prefixes",
    "prefixes_of_requests",
]


@dataclass(frozen=True)
class SharedPrefix:
    """Tokens `[start, end)` that some requests of a batch have in the same cache blocks.

    Several levels form a tree: a prefix that continues another one starts where that one ends, and
    its requests are some of the requests of that one.

    Attributes:
        requests: rows of the batch, in increasing order; at least two.
        start, end: positions in each of the requests. Both are multiples of the block size.
    """

    requests: tuple[int, ...]
    start: int
    end: int


def find_shared_prefixes(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    block_size: int,
    *,
    min_tokens: int = 1,
) -> list[SharedPrefix]:
    """Find all prefixes that two or more requests share, with all levels of the tree.

    Only full blocks of the context count, because new tokens of a step are not visible to all
    queries of the step. RadixAttention (SGLang) shares prefixes by the same criterion.

    Args:
        block_table: `[R, max_blocks]` integers on the CPU.
        context_lens: `[R]` integers on the CPU, tokens in the cache before this step.
        block_size: tokens per block.
        min_tokens: a shorter prefix is not reported, nor are prefixes that continue it.

    Returns:
        The prefixes, each after the one that it continues. Empty if nothing is shared.

    Raises:
        ContractError: a tensor on another device, or with another shape.
    """
    for name, given in (("block_table", block_table), ("context_lens", context_lens)):
        if not isinstance(given, torch.Tensor):
            raise ContractError(
                f"{name} is a {type(given).__name__}; it must be an integer tensor on the CPU"
            )
    if block_table.device.type != "cpu" or context_lens.device.type != "cpu":
        raise ContractError(
            f"find_shared_prefixes got tensors on {block_table.device} and {context_lens.device}: "
            "pass host copies, so that a step needs no synchronization"
        )
    if block_table.dim() != 2 or context_lens.shape != block_table.shape[:1]:
        raise ContractError(
            f"block_table is {list(block_table.shape)} and context_lens "
            f"{list(context_lens.shape)}; they must be [R, max_blocks] and [R]"
        )
    for name, given in (("block_table", block_table), ("context_lens", context_lens)):
        if given.is_floating_point():
            raise ContractError(f"{name} is {given.dtype}; it must hold integers")
    block_size = as_count("block_size", block_size, 1)
    min_tokens = as_id("min_tokens", min_tokens)
    blocks = (context_lens.clamp(min=0) // block_size).clamp(max=block_table.shape[1]).tolist()
    table = block_table.tolist()
    found: list[SharedPrefix] = []
    pending = [(requests, 0) for requests in _groups(range(len(table)), table, blocks, 0)]
    while pending:
        requests, column = pending.pop(0)
        end = _shared_end(requests, table, blocks, column)
        if (end - column) * block_size < min_tokens:
            continue
        found.append(SharedPrefix(tuple(requests), column * block_size, end * block_size))
        pending += [(group, end) for group in _groups(requests, table, blocks, end)]
    return found


def _groups(
    requests: Sequence[int], table: list[list[int]], blocks: list[int], column: int
) -> list[list[int]]:
    """The requests by the block in `column`; groups of one are left out."""
    by_block: dict[int, list[int]] = {}
    for request in requests:
        if blocks[request] > column:
            by_block.setdefault(table[request][column], []).append(request)
    return [group for group in by_block.values() if len(group) > 1]


def _shared_end(requests: list[int], table: list[list[int]], blocks: list[int], column: int) -> int:
    """The first column from `column` on in which the requests differ."""
    first = table[requests[0]]
    end = min(blocks[request] for request in requests)
    for request in requests[1:]:
        row = table[request]
        if row[column:end] != first[column:end]:
            end = next(i for i in range(column, end) if row[i] != first[i])
    return end


def prefixes_of_requests(
    prefixes: Sequence[SharedPrefix] | None, first: int, end: int
) -> tuple[SharedPrefix, ...] | None:
    """The shared prefixes of requests `[first, end)`, counted from `first`.

    A prefix whose requests are not all in the range is left out, with those that continue it. The
    result stays correct: a prefix that is left out is computed by each of its requests.
    """
    if prefixes is None:
        return None
    kept: list[SharedPrefix] = []
    reached = dict.fromkeys(range(first, end), 0)
    for prefix in prefixes:
        if all(reached.get(request) == prefix.start for request in prefix.requests):
            reached.update(dict.fromkeys(prefix.requests, prefix.end))
            rows = tuple(request - first for request in prefix.requests)
            kept.append(SharedPrefix(rows, prefix.start, prefix.end))
    return tuple(kept)


def check_shared_prefixes(
    prefixes: Sequence[SharedPrefix], context_lens: Sequence[int], block_size: int
) -> list[int]:
    """Check the shared prefixes of a batch and return how many tokens of each request they cover.

    Args:
        prefixes: of the batch, each after the one that it continues.
        context_lens: tokens of each request in the cache before this step.
        block_size: tokens per block.

    Returns:
        For each request, the end of its longest prefix; 0 without one.

    Raises:
        ContractError: a row that is not in the batch, fewer than two requests, positions that are
            not multiples of the block size or past the context, or a prefix that does not start
            where the previous one of a request ends.
    """
    reached = [0] * len(context_lens)
    for prefix in prefixes:
        if len(prefix.requests) < 2 or len(set(prefix.requests)) != len(prefix.requests):
            raise _error(prefix, "needs at least two different requests")
        if prefix.start >= prefix.end or prefix.start % block_size or prefix.end % block_size:
            raise _error(prefix, f"must cover one or more whole blocks of {block_size} tokens")
        for request in prefix.requests:
            if not 0 <= request < len(context_lens):
                raise _error(prefix, f"names request {request} of {len(context_lens)}")
            if reached[request] != prefix.start:
                raise _error(
                    prefix,
                    f"starts at {prefix.start}, but the prefixes of request {request} "
                    f"end at {reached[request]}: list each prefix after the one that it continues",
                )
            if prefix.end > context_lens[request]:
                raise _error(
                    prefix,
                    f"ends past the {context_lens[request]} tokens that request {request} "
                    "has in the cache before this step",
                )
            reached[request] = prefix.end
    return reached


def check_shared_blocks(
    prefixes: Sequence[SharedPrefix], block_table: torch.Tensor, block_size: int
) -> None:
    """Check that the requests of each prefix have its tokens in the same blocks. Synchronizes.

    Raises:
        ContractError: a request has another block than the first request of the prefix.
    """
    table = block_table.cpu()
    for prefix in prefixes:
        columns = slice(prefix.start // block_size, prefix.end // block_size)
        rows = table[list(prefix.requests), columns]
        differs = (rows != rows[0]).any(1)
        if bool(differs.any()):
            request = prefix.requests[int(differs.int().argmax())]
            raise _error(prefix, f"is not in the same blocks of the cache for request {request}")


def _error(prefix: SharedPrefix, problem: str) -> ContractError:
    requests = ", ".join(str(request) for request in prefix.requests[:8])
    more = ", ..." if len(prefix.requests) > 8 else ""
    return ContractError(
        f"the shared prefix [{prefix.start}, {prefix.end}) of requests ({requests}{more}) {problem}"
    )
