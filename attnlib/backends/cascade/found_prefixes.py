"""Which prefixes the requests of a batch share, by what the batch states or its block table."""

from __future__ import annotations

from collections.abc import Sequence

from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.shared_prefix import (
    SharedPrefix,
    check_shared_prefixes,
    find_shared_prefixes,
)

__all__ = ["prefixes_of"]


def prefixes_of(
    common: CommonAttentionMetadata, common_prefix_len: int, block_size: int
) -> Sequence[SharedPrefix]:
    """The shared prefixes of a batch; empty where lengths or blocks are not known on the host.

    Args:
        common: the batch.
        common_prefix_len: leading tokens that all requests share. Read only if the batch does not
            state its shared prefixes.
        block_size: N.

    Raises:
        ContractError: shared prefixes that the batch cannot have.
    """
    if (
        common.num_reqs < 2
        or common.is_cross_attention
        or common.query_start_loc_cpu is None
        or common.seq_lens_cpu is None
        or common.block_table_tensor is None
    ):
        return []
    context = common.seq_lens_cpu - common.query_lens_cpu
    if common.shared_prefixes is not None:
        check_shared_prefixes(common.shared_prefixes, context.tolist(), block_size)
        return common.shared_prefixes
    if common.block_table_tensor.device.type == "cpu":
        return find_shared_prefixes(common.block_table_tensor, context, block_size)
    if not common_prefix_len:
        return []
    end = min(common_prefix_len, int(context.min())) // block_size * block_size
    return [SharedPrefix(tuple(range(common.num_reqs)), 0, end)] if end > 0 else []
