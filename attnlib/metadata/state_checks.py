"""Checks of batches that are copied into the buffers of a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnlib.errors import ContractError
from attnlib.metadata.checks import check_block_size
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.graph_buffers import block_size_of
from attnlib.ops.addresses import as_count
from attnlib.spec import StateSpec
from attnlib.workspace import BatchLimits

if TYPE_CHECKING:
    from attnlib.metadata.state import AttentionState

__all__ = ["check_fits", "check_size"]


def check_fits(
    state: AttentionState[Any], common: CommonAttentionMetadata, reqs: int, query_len: int
) -> None:
    """Whether a batch fits the buffers of a graph.

    Args:
        state: the buffers.
        common: the batch.
        reqs, query_len: the size of the capture.

    Raises:
        ContractError: it does not; names the limit.
    """
    check_size(state.limits, reqs, query_len)
    check_block_size(common, state.builder.spec)
    if common.num_reqs > reqs or common.max_query_len > query_len:
        raise ContractError(
            f"{common.num_reqs} requests of up to {common.max_query_len} tokens do not fit a "
            f"graph captured for {reqs} requests of {query_len}: capture a larger graph, or "
            "run this batch without a graph"
        )
    for name, value in (("causal", common.causal), ("query_bias", common.query_bias)):
        if isinstance(value, torch.Tensor):
            raise ContractError(
                f"{name} is a tensor of this batch, and a captured graph would keep reading "
                "it: run such batches without a graph"
            )
    _check_parts(state, common)
    if common.is_cross_attention and common.slot_mapping is not None:
        raise ContractError(
            "a graph writes the keys of its own tokens only: write the keys of cross-attention "
            "in a step without a graph, then replay with slot_mapping=None"
        )
    for name in state.score_names:
        given = (common.score_tensors or {}).get(name)
        if given is None or given.shape[1] > state.score_columns:
            found = "missing" if given is None else f"{given.shape[1]} columns wide"
            raise ContractError(
                f"the batch tensor {name!r} of the score function is {found}; the captured one "
                f"has {state.score_columns} columns: pass score_columns to AttentionState",
                rule="M10",
            )
    width = 0 if common.block_table_tensor is None else common.block_table_tensor.shape[1]
    # A table may be wider than its sequences, as those of pools are.
    width = min(width, -(-common.max_seq_len // block_size_of(state.builder.spec)))
    if width > state.max_blocks:
        raise ContractError(
            f"max_seq_len={common.max_seq_len} needs {width} columns of block_table, the captured "
            f"one has {state.max_blocks}: raise max_seq_len in the limits, or max_blocks",
            rule="P3",
        )
    if common.max_seq_len > state.limits.max_seq_len:
        raise ContractError(
            f"max_seq_len={common.max_seq_len} exceeds the {state.limits.max_seq_len} that "
            "graphs are captured for: raise it in the limits"
        )


def _check_parts(state: AttentionState[Any], common: CommonAttentionMetadata) -> None:
    """Whether a batch has what a replay reads, which would be that of the batch before."""
    has_states = isinstance(state.builder.spec, StateSpec)
    name, rule = ("state_slots", "T7") if has_states else ("block_table_tensor", "P3")
    if getattr(common, name) is None:
        raise ContractError(
            f"{name} is None, and a graph would read that of the batch before: pass it", rule=rule
        )


def check_size(limits: BatchLimits, reqs: int, query_len: int) -> None:
    """Whether a capture is within the limits.

    Raises:
        ContractError: it is not, or a number is not a count.
    """
    reqs, query_len = as_count("requests", reqs), as_count("query_len", query_len)
    if reqs > limits.max_num_reqs or reqs * query_len > limits.max_num_tokens:
        raise ContractError(
            f"{reqs} requests of {query_len} tokens exceed the limits of "
            f"{limits.max_num_reqs} requests and {limits.max_num_tokens} tokens: "
            "raise the limits"
        )
