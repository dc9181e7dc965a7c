"""Metadata of backends that read a dense block table: one batch, split into decodes and prefills.

Requests with few new tokens are bound by memory and form the decode part; they come first
(`reorder_batch`), so that each part is a slice of the batch and of q. A decode behind a prefill is
computed correctly by the prefill kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch

from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.facts import BatchFacts
from attnlib.metadata.paged_fields import paged_fields
from attnlib.spec import AttentionSpec

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
            self.causal,
            self.query_bias,
            self.block_table,
            self.score_tensors,
        )
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
