"""Metadata of backends that read a dense block table: one batch, split into decodes and prefills.

Requests with few new tokens are bound by memory and form the decode part; they come first
(`reorder_batch`), so that each part is a slice of the batch and of q. A decode behind a prefill is
computed correctly by the prefill kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.checks import check_batch
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.facts import BatchFacts
from attnlib.metadata.split import leading_decodes
from attnlib.spec import AttentionSpec, MaskKind

__all__ = ["PagedMetadata", "PartTensors", "paged_fields"]

P = TypeVar("P", bound="PagedMetadata")


class PartTensors(NamedTuple):
    """The tensors of the decode part or of the prefill part; attributes as in `PagedMetadata`."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    causal: bool | torch.Tensor
    query_bias: torch.Tensor | None
    score_tensors: Mapping[str, torch.Tensor] | None


@dataclass(kw_only=True)
class PagedMetadata(AttentionMetadata):
    """A batch over the paged cache (with `block_table` None, over unpaged keys).

    Attributes:
        spec: the spec that the batch was built for; a layer checks it at the first call.
        num_actual_tokens: T.
        num_decodes: requests of the decode part.
        max_query_len, max_seq_len: upper bounds over the batch.
        max_decode_query_len: upper bound over the decode part.
        query_start_loc: [R+1] int32 device.
        prefill_query_start_loc: [num_prefills+1] int32 device, counted from the first prefill
            token; None unless both parts are present.
        seq_lens: [R] int32 device.
        block_table: [R, max_blocks] int32 device, or None.
        causal: for the batch or per request ([R] device), from the batch or else from the spec.
        causal_from_spec: whether the batch left `causal` to the spec.
        query_bias: [T, >= max_query_len] float32 device or None.
        score_tensors: batch tensors of the score function by name, [R, m] int32 device, or None.
        query_start_loc_cpu, seq_lens_cpu: host copies, for backends that plan on the host, or None.
        is_cross_attention: the keys are those of another sequence.
    """

    spec: AttentionSpec
    num_actual_tokens: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    max_decode_query_len: int
    query_start_loc: torch.Tensor
    prefill_query_start_loc: torch.Tensor | None
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    causal: bool | torch.Tensor
    causal_from_spec: bool
    query_bias: torch.Tensor | None
    score_tensors: Mapping[str, torch.Tensor] | None
    query_start_loc_cpu: torch.Tensor | None
    seq_lens_cpu: torch.Tensor | None
    is_cross_attention: bool = False

    @property
    def facts(self) -> BatchFacts:
        """This object, which has them all."""
        return self

    @property
    def num_reqs(self) -> int:
        """R."""
        return self.num_decodes + self.num_prefills

    @cached_property
    def decode_metadata(self: P) -> P | None:
        """The decode part as a batch; None when it is empty."""
        if self.num_decodes == 0:
            return None
        return self if self.num_prefills == 0 else self._part(is_decode=True)

    @cached_property
    def prefill_metadata(self: P) -> P | None:
        """The prefill part as a batch; None when it is empty."""
        if self.num_prefills == 0:
            return None
        return self if self.num_decodes == 0 else self._part(is_decode=False)

    def part_tensors(self, *, is_decode: bool) -> PartTensors:
        """The tensors of one part of a batch that has both: without copies, except where
        `prefill_query_start_loc` is None."""
        requests, tokens = self._rows_of_part(is_decode)
        causal, bias, table, score = (
            self.causal, self.query_bias, self.block_table, self.score_tensors,
        )  # fmt: skip
        return PartTensors(
            self.query_start_loc[: requests.stop + 1] if is_decode else self._prefill_starts(),
            self.seq_lens[requests],
            None if table is None else table[requests],
            causal[requests] if isinstance(causal, torch.Tensor) else causal,
            None if bias is None else bias[tokens],
            None if score is None else {name: rows[requests] for name, rows in score.items()},
        )

    def _part(self: P, *, is_decode: bool) -> P:
        requests, tokens = self._rows_of_part(is_decode)
        count, num_tokens = requests.stop - requests.start, tokens.stop - tokens.start
        starts, lens = self.query_start_loc_cpu, self.seq_lens_cpu
        if starts is not None:
            starts = starts[requests.start : requests.stop + 1] - starts[requests.start]
        changes = {
            **self.part_tensors(is_decode=is_decode)._asdict(),
            "num_actual_tokens": num_tokens,
            "num_decodes": count if is_decode else 0,
            "num_decode_tokens": num_tokens if is_decode else 0,
            "num_prefills": 0 if is_decode else count,
            "num_prefill_tokens": 0 if is_decode else num_tokens,
            "max_query_len": self.max_decode_query_len if is_decode else self.max_query_len,
            "prefill_query_start_loc": None,
            "slot_mapping": None if self.slot_mapping is None else self.slot_mapping[tokens],
            "query_start_loc_cpu": starts,
            "seq_lens_cpu": None if lens is None else lens[requests],
        }
        # By state, because the constructor passes every field through `__setattr__`.
        part: P = type(self).from_fields({**self.__getstate__(), **changes})
        return part

    def _rows_of_part(self, is_decode: bool) -> tuple[slice, slice]:
        """The requests and the tokens of a part."""
        requests, tokens = self.num_decodes, self.num_decode_tokens
        if is_decode:
            return slice(0, requests), slice(0, tokens)
        return slice(requests, requests + self.num_prefills), slice(tokens, self.num_actual_tokens)

    def _prefill_starts(self) -> torch.Tensor:
        if self.prefill_query_start_loc is not None:
            return self.prefill_query_start_loc
        first, end = self.num_decodes, self.num_decodes + self.num_prefills + 1
        return self.query_start_loc[first:end] - self.num_decode_tokens


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
        ContractError: a batch that `check_batch` refuses, or a score function without its batch
            tensors.
    """
    check_batch(common, spec, needs_host_lengths=needs_host_lengths)
    is_paged, table = spec.is_paged, common.block_table_tensor
    threshold = decode_threshold if is_paged and decode_threshold is not None else 0
    num_decodes, decode_tokens = leading_decodes(common, threshold)
    if decode_tokens == 0:
        num_decodes = 0  # only padding in front: the prefill part takes the whole batch
    num_prefills = common.num_reqs - num_decodes
    mixed = num_decodes > 0 and num_prefills > 0
    longest_decode = min(threshold, common.max_query_len)
    if mixed and this_batch_only:
        longest_decode = int(common.query_lens_cpu[:num_decodes].max())
    _check_mask(common, spec)
    starts = common.query_start_loc.contiguous()
    if not is_paged:
        table = None
    elif not (table is None or table.is_contiguous()) and (
        table.stride(-1) != 1 and table.shape[-1] > 1
    ):
        table = table.contiguous()
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
        "block_table": table,
        "causal": spec.is_causal if common.causal is None else common.causal,
        "causal_from_spec": common.causal is None,
        "query_bias": common.query_bias,
        "score_tensors": None if spec.score_function is None else _score_tensors(common, spec),
        "query_start_loc_cpu": common.query_start_loc_cpu,
        "seq_lens_cpu": common.seq_lens_cpu,
        "is_cross_attention": common.is_cross_attention,
    }


def _check_mask(common: CommonAttentionMetadata, spec: AttentionSpec) -> None:
    if common.query_bias is not None and spec.mask_kind is not MaskKind.QUERY_BIAS:
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
    given = common.score_tensors or {}
    function.check_tensors(given, function.batch_tensors, "batch")
    for name in function.batch_tensors:
        if given[name].shape[0] != common.num_reqs:
            raise ContractError(
                f"batch tensor {name!r} of score function {function} has {given[name].shape[0]} "
                f"rows; it must have one for each of the {common.num_reqs} requests",
                rule="M10",
            )
    return {name: given[name] for name in function.batch_tensors}
