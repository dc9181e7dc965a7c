"""Checks of a batch when its metadata is built, besides those when it is made (`metadata.form`).

ATTNLIB_VALIDATE=1 adds the checks of `attnlib.metadata.values`, which copy tensors from the device.
"""

from __future__ import annotations

import torch

from attnlib import env
from attnlib.errors import ContractError
from attnlib.metadata.batch_values import BatchValues
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.host_lengths import check_type
from attnlib.metadata.shared_prefix import check_shared_blocks
from attnlib.metadata.values import check_values
from attnlib.spec import AttentionSpec, StateSpec
from attnlib.workspace import BatchLimits

__all__ = ["check_batch", "check_block_size", "check_limits"]


def check_batch(
    common: CommonAttentionMetadata,
    spec: AttentionSpec | StateSpec,
    *,
    needs_host_lengths: bool = True,
) -> None:
    """Check a batch; every builder calls this before it uses one.

    Args:
        common: the batch.
        spec: of the layers; decides whether a block table is needed.
        needs_host_lengths: of the builder. If False, lengths on the host may be all 0, or upper
            bounds.

    Raises:
        ContractError: another type, or no block table where the layers need one. With
            ATTNLIB_VALIDATE also for values that contradict each other.
    """
    if type(common) is not CommonAttentionMetadata:
        check_type(common)
    if isinstance(spec, StateSpec):
        _check_state_batch(common, needs_host_lengths)
        return
    if common.block_table_tensor is None and spec.is_paged:
        raise ContractError(
            f"attn_type={spec.attn_type.value} reads the cache through a block table, but the "
            "batch has none: pass block_table and block_size",
            rule="P3",
        )
    if env.read("ATTNLIB_VALIDATE") and not _is_capturing(common.seq_lens):
        check_values(BatchValues.of_batch(common, spec.block_size, needs_host_lengths))
        if common.shared_prefixes and common.block_table_tensor is not None:
            check_shared_blocks(common.shared_prefixes, common.block_table_tensor, spec.block_size)


def _check_state_batch(common: CommonAttentionMetadata, needs_host_lengths: bool) -> None:
    """`check_batch` for state layers, which read slots of states and no blocks."""
    if common.state_slots is None:
        raise ContractError(
            "the batch has no state_slots, and state layers find their states by them: pass "
            "state_slots, the slot of each request",
            rule="T7",
        )
    if env.read("ATTNLIB_VALIDATE") and not _is_capturing(common.seq_lens):
        values = BatchValues.of_batch(common, 1, needs_host_lengths)
        check_values(values._replace(table=None, slots=None))


def check_block_size(common: CommonAttentionMetadata, spec: AttentionSpec | StateSpec) -> None:
    """Whether the table and slots of a batch count in the blocks of the layers.

    Raises:
        ContractError: they were made for another block size.
    """
    if isinstance(spec, StateSpec):
        return
    if spec.is_paged and common.block_size not in (None, spec.block_size):
        raise ContractError(
            f"the batch was made with block_size={common.block_size}, the layers have "
            f"block_size={spec.block_size}: their slots are others; make the batch with "
            f"block_size={spec.block_size}",
            rule="P3",
        )


def check_limits(common: CommonAttentionMetadata, limits: BatchLimits) -> None:
    """Whether a batch is within the limits that its builder declared.

    Raises:
        ContractError: it is not; names the limit.
    """
    if (
        common.num_reqs <= limits.max_num_reqs
        and max(common.num_actual_tokens, common.max_query_len) <= limits.max_num_tokens
        and common.max_seq_len <= limits.max_seq_len
    ):
        return
    for name, found, of_limit in (
        ("num_reqs", common.num_reqs, "max_num_reqs"),
        ("num_actual_tokens", common.num_actual_tokens, "max_num_tokens"),
        ("max_query_len", common.max_query_len, "max_num_tokens"),
        ("max_seq_len", common.max_seq_len, "max_seq_len"),
    ):
        if found > (limit := getattr(limits, of_limit)):
            raise ContractError(
                f"{name}={found} of the batch exceeds {of_limit}={limit} of the BatchLimits that "
                f"the builder was made with: raise {of_limit}, or split the batch"
            )


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
