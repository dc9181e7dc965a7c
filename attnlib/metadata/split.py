"""Split a batch into decodes and prefills, and reorder a batch for it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from attnlib.errors import AssertedContractError, ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.host_lengths import with_host_lengths

__all__ = [
    "reorder_batch_to_split_decodes_and_prefills",
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
    "split_prefill_chunks",
]


class InputBatch(Protocol):
    """The part of a runner's batch that reordering uses."""

    @property
    def req_ids(self) -> list[str]:
        """The request id of each row."""

    def swap_states(self, first: int, second: int) -> None:
        """Exchange two rows."""


class BatchStarts(Protocol):
    """The part of a batch that decides how it is split; its starts may be longer than the batch."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    query_start_loc_cpu: torch.Tensor | None


def split_decodes_and_prefills(
    common_attn_metadata: BatchStarts,
    decode_threshold: int = 1,
    *,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """Count the decodes and prefills of a batch that is sorted with decodes first.

    Args:
        common_attn_metadata: the batch, of any class with the fields of `BatchStarts`.
        decode_threshold: largest number of new tokens of a decode.
        require_uniform: decodes must have as many tokens as the first request. Empty padding rows
            count as decodes.

    Returns:
        (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens).

    Raises:
        AssertedContractError: a decode follows a prefill; reorder the batch first.
        ContractError: the batch has no `query_start_loc_cpu`.
    """
    common = common_attn_metadata
    if common.num_reqs == 0 or (common.max_query_len <= decode_threshold and not require_uniform):
        return common.num_reqs, 0, common.num_actual_tokens, 0
    if common.query_start_loc_cpu is None:
        raise ContractError("query_start_loc_cpu is None, but splitting a batch reads it: pass it")
    lengths = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
    is_prefill = lengths > decode_threshold
    if require_uniform:
        is_prefill = is_prefill | ((lengths != lengths[0]) & (lengths != 0))
    first = first_true(is_prefill)
    if not require_uniform and not bool(is_prefill[first:].all()):
        request = first + first_true(~is_prefill[first:])
        raise AssertedContractError(
            f"request {request} has {int(lengths[request])} new tokens (a decode, threshold "
            f"{decode_threshold}), but follows request {first} with {int(lengths[first])}: reorder "
            f"the batch so that decodes come first"
        )
    if first == lengths.shape[0]:  # tokens of padding belong to no prefill
        return common.num_reqs, 0, common.num_actual_tokens, 0
    decode_tokens = int(lengths[:first].sum())
    return first, common.num_reqs - first, decode_tokens, common.num_actual_tokens - decode_tokens


def leading_decodes(common: CommonAttentionMetadata, decode_threshold: int) -> tuple[int, int]:
    """(requests, tokens) of the leading decodes of a batch in any order.

    Everything after them is served as a prefill, including decodes. If the host does not have the
    query lengths, a batch with longer requests is one prefill.
    """
    if common.max_query_len <= decode_threshold:
        return common.num_reqs, common.num_actual_tokens
    if common.query_start_loc_cpu is None:
        return 0, 0
    first = first_true(common.query_lens_cpu > decode_threshold)
    return first, int(common.query_start_loc_cpu[first])


def first_true(flags: torch.Tensor) -> int:
    """Index of the first True, or the length if there is none."""
    return int(flags.int().argmax()) if bool(flags.any()) else flags.shape[0]


def split_decodes_prefills_and_extends(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int, int, int]:
    """Count the decodes, extends and pure prefills of a batch that is sorted in this order.

    An extend has context in the cache, a pure prefill has none.

    Returns:
        (num_decodes, num_extends, num_prefills, num_decode_tokens, num_extend_tokens,
        num_prefill_tokens).

    Raises:
        ContractError: the batch is not sorted, or has no `query_start_loc_cpu` or `seq_lens_cpu`.
    """
    common = with_host_lengths(common_attn_metadata, "split_decodes_prefills_and_extends")
    decodes, rest, decode_tokens, rest_tokens = split_decodes_and_prefills(common, decode_threshold)
    assert common.seq_lens_cpu is not None
    pure = common.seq_lens_cpu.eq(common.query_lens_cpu)[decodes:]
    extends = first_true(pure)
    if not bool(pure[extends:].all()):
        request = decodes + extends + first_true(~pure[extends:])
        raise ContractError(
            f"request {request} has context, but follows a pure prefill: reorder the batch so that "
            f"extends come first"
        )
    extend_tokens = int(common.query_lens_cpu[decodes : decodes + extends].sum())
    return (
        decodes,
        extends,
        rest - extends,
        decode_tokens,
        extend_tokens,
        rest_tokens - extend_tokens,
    )


def split_prefill_chunks(
    seq_lens_cpu: torch.Tensor, workspace_size: int, request_offset: int = 0
) -> list[tuple[int, int]]:
    """Group consecutive requests greedily so that the lengths of a group fit a workspace.

    Args:
        seq_lens_cpu: `[R]` lengths.
        workspace_size: largest sum of lengths of a group.
        request_offset: index of the first request.

    Returns:
        (first, end) request indices of each group.

    Raises:
        ContractError: a single request exceeds `workspace_size`.
    """
    chunks: list[tuple[int, int]] = []
    start = total = 0
    for index, length in enumerate(int(n) for n in seq_lens_cpu):
        if length > workspace_size:
            raise ContractError(
                f"seq_lens[{request_offset + index}]={length} exceeds workspace_size="
                f"{workspace_size}: give the builder a larger workspace"
            )
        if total + length > workspace_size:
            chunks.append((request_offset + start, request_offset + index))
            start, total = index, 0
        total += length
    if start < seq_lens_cpu.shape[0]:
        chunks.append((request_offset + start, request_offset + seq_lens_cpu.shape[0]))
    return chunks


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: InputBatch, scheduler_output: Any, decode_threshold: int = 1
) -> bool:
    """Move requests with at most `decode_threshold` scheduled tokens to the front.

    Args:
        input_batch: has `req_ids` by row and `swap_states(i, j)`.
        scheduler_output: has `num_scheduled_tokens`, request id -> tokens.
        decode_threshold: as in `split_decodes_and_prefills`.

    Returns:
        True if rows were exchanged.
    """
    is_decode = [
        scheduler_output.num_scheduled_tokens[request] <= decode_threshold
        for request in input_batch.req_ids
    ]
    num_decodes = sum(is_decode)
    # Each prefill among the first rows is exchanged with a decode after them; this is the smallest
    # number of swaps.
    misplaced_prefills = [row for row in range(num_decodes) if not is_decode[row]]
    misplaced_decodes = [row for row in range(num_decodes, len(is_decode)) if is_decode[row]]
    for prefill, decode in zip(misplaced_prefills, reversed(misplaced_decodes), strict=True):
        input_batch.swap_states(prefill, decode)
    return bool(misplaced_prefills)
