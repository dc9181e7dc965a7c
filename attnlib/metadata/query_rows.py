"""The batch tensor by which score functions find the rows of their queries (M21)."""

from __future__ import annotations

from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.score_functions.function import ScoreFunction
from attnlib.score_functions.query_tensors import QUERY_ROW, query_row_tensor

__all__ = ["with_query_rows"]


def with_query_rows(
    common: CommonAttentionMetadata, function: ScoreFunction | None
) -> CommonAttentionMetadata:
    """The batch with `query_row`, for a function that has query tensors. No host sync.

    Args:
        common: the batch. One that has the tensor stays as it is: a part of a batch has the rows
            of the whole one.
        function: of the layers.
    """
    given = common.score_tensors or {}
    if function is None or not function.query_tensors or QUERY_ROW in given:
        return common
    rows = query_row_tensor(common.query_start_loc, common.seq_lens)
    return common.replace(score_tensors={**given, QUERY_ROW: rows})
