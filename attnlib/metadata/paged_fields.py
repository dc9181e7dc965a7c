"""The fields of the metadata of backends that read a dense block table."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.metadata.checks import check_batch
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.query_rows import with_query_rows
from attnlib.metadata.split import leading_decodes
from attnlib.spec import AttentionSpec, MaskKind

__all__ = ["paged_fields"]


def paged_fields(
    common: CommonAttentionMetadata,
    spec: AttentionSpec,
    decode_threshold: int | None,
    *,
    this_batch_only: bool = False,
    needs_host_lengths: bool = True,
) -> dict[str, Any]:
    """The fields of `PagedMetadata` for a batch, as keyword arguments for a subclass. No host sync.

    Args:
        common: the batch. Strided metadata is made contiguous.
        spec: decides causality where the batch leaves it open, and whether a table is needed.
        decode_threshold: most new tokens of a request in the decode part; None puts every request
            into the prefill part.
        this_batch_only: bound the decodes of a mixed batch by the longest one in it, which allows
            smaller tiles. Unsafe for a step that is captured and replayed with other lengths.
        needs_host_lengths: of the builder.

    Raises:
        ContractError: `check_batch` refuses the batch, or a score function lacks its batch tensors.
    """
    check_batch(common, spec, needs_host_lengths=needs_host_lengths)
    if common.query_bias is not None:
        _check_mask(spec)
    table = common.block_table_tensor if spec.is_paged else None
    threshold = decode_threshold if table is not None and decode_threshold is not None else 0
    num_decodes, decode_tokens = leading_decodes(common, threshold)
    if decode_tokens == 0:
        num_decodes = 0  # only padding in front: the prefill part takes the whole batch
    num_prefills = common.num_reqs - num_decodes
    mixed = num_decodes > 0 and num_prefills > 0
    longest_decode = min(threshold, common.max_query_len)
    if mixed and this_batch_only:
        longest_decode = int(common.query_lens_cpu[:num_decodes].max())
    starts = common.query_start_loc.contiguous()
    slots = None if common.slot_mapping is None else common.slot_mapping.contiguous()
    return {
        "spec": spec,
        "num_prefills": num_prefills,
        "num_prefill_tokens": common.num_actual_tokens - decode_tokens,
        "num_decode_tokens": decode_tokens,
        "slot_mapping": slots,
        "num_actual_tokens": common.num_actual_tokens,
        "num_decodes": num_decodes,
        "max_query_len": common.max_query_len,
        "max_seq_len": common.max_seq_len,
        "max_decode_query_len": longest_decode,
        "query_start_loc": starts,
        "prefill_query_start_loc": starts[num_decodes:] - decode_tokens if mixed else None,
        "seq_lens": common.seq_lens.contiguous(),
        "block_table": table if table is None or table.is_contiguous() else _readable(table),
        "causal": spec.is_causal if common.causal is None else common.causal,
        "causal_from_spec": common.causal is None,
        "query_bias": common.query_bias,
        "score_tensors": None if spec.score_function is None else _score_tensors(common, spec),
        "query_start_loc_cpu": common.query_start_loc_cpu,
        "seq_lens_cpu": common.seq_lens_cpu,
        "is_cross_attention": common.is_cross_attention,
    }


def _readable(table: torch.Tensor) -> torch.Tensor:
    """A block table with rows that kernels can read: entries of a row are adjacent."""
    return table if table.stride(-1) == 1 or table.shape[-1] <= 1 else table.contiguous()


def _check_mask(spec: AttentionSpec) -> None:
    """Whether the layers take the bias over the new tokens that a batch has."""
    if spec.mask_kind is not MaskKind.QUERY_BIAS:
        raise ContractError(
            f"query_bias is given, but the layer has mask_kind={spec.mask_kind.value}: a bias over "
            "the new tokens needs mask_kind='query_bias'",
            rule="M3",
        )


def _score_tensors(
    common: CommonAttentionMetadata, spec: AttentionSpec
) -> dict[str, torch.Tensor] | None:
    """The batch tensors that the score function of the spec reads; None if it reads none.

    Raises:
        ContractError: one is missing, or has another layout or number of rows.
    """
    function = spec.score_function
    if function is None or not function.batch_tensors:
        return None
    given = with_query_rows(common, function).score_tensors or {}
    function.check_tensors(given, function.batch_tensors, "batch")
    for name in function.batch_tensors:
        if given[name].shape[0] != common.num_reqs:
            raise ContractError(
                f"batch tensor {name!r} of score function {function} has {given[name].shape[0]} "
                f"rows; it must have one for each of the {common.num_reqs} requests",
                rule="M10",
            )
    return {name: given[name] for name in function.batch_tensors}
