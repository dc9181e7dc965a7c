"""Metadata of one batch that all layers and all backends share. Names follow vLLM v1.

Shapes: R requests, T new tokens, packed without padding between requests, N block size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.device import explains_device
from attnlib.errors import ContractError
from attnlib.metadata.batch_slice import slice_batch
from attnlib.metadata.form import check_form, check_types
from attnlib.metadata.length_fields import length_fields, request_starts
from attnlib.metadata.lengths import (
    TableLike,
    checked_lengths,
    largest,
    new_keys,
    table_and_slots,
)
from attnlib.metadata.shared_prefix import SharedPrefix
from attnlib.metadata.state_slots import state_slot_fields
from attnlib.ops.addresses import as_count, as_id

__all__ = ["CommonAttentionMetadata"]


@dataclass(kw_only=True)
class CommonAttentionMetadata:
    """One batch, shared by layers and backends. Builders convert it to metadata of their backend.
    All arguments are keywords. `attnlib.compat.vllm.backend_utils.CommonAttentionMetadata` takes
    vLLM's ten, by position or by name: without `max_seq_len`, and in more forms.

    Dtypes, shapes, devices and upper bounds are checked once, here.

    Attributes:
        query_start_loc: [R+1] int32 device; index of the first token of each request, then T.
        query_start_loc_cpu: [R+1] int32 CPU; the same values. None if the host does not have them;
            then a batch with both decodes and prefills is not split.
        seq_lens: [R] int32 device; context and new tokens of each request (M1).
        seq_lens_cpu: [R] int32 CPU; the same values, or None. Builders with
            `needs_host_lengths=False` do not read it: `max_seq_len` is enough for them.
        num_computed_tokens_cpu: [R] int32 CPU; context only, or None.
        num_reqs: R.
        num_actual_tokens: T; q, k and v may have more rows (padding of a CUDA graph).
        max_query_len: an upper bound on the query lengths.
        max_seq_len: an upper bound on the sequence lengths, known to the host.
        block_table_tensor: [R, max_blocks] int32 device (P3); None where nothing is cached
            (encoders).
        slot_mapping: [T] int64 device (P4). A longer tensor is replaced by a view of its first T
            slots. None where nothing is cached. With `is_cross_attention`, one slot per row of the
            keys given to the layer, [Tk], or None where nothing is written.
        causal: True, False, or a bool per request ([R] device). None means that the spec of the
            layer decides.
        query_bias: [T, >= max_query_len] float32 device; column j is added to the score of the j-th
            new token of the row's request. -inf masks that token.
        score_tensors: the batch tensors of the layers' score function by name (M10), [R, m] int32
            device; None for layers without one.
        is_cross_attention: the keys come from another sequence (encoder output), which does not
            contain the queries.
        shared_prefixes: prefixes that requests have in the same cache blocks, as
            `metadata.shared_prefix.find_shared_prefixes` finds them in a block table on the host;
            None if they are not known. They change no result (M13); backends named
            `prefix:NAME,suffix:NAME` compute them once.
        state_slots: [R] int32 device; the slot of each request in state layers, -1 for padding
            (T7). None for a batch without state layers.
        state_sources: [R] int32 device; the slot that each request reads where it is another one
            than it writes (T12). None reads `state_slots`.
        block_size: tokens per block of `block_table_tensor` and `slot_mapping`, which a builder
            compares with its own; None if it is not known.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor | None = None
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None = None
    num_computed_tokens_cpu: torch.Tensor | None = None
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    causal: bool | torch.Tensor | None = None
    query_bias: torch.Tensor | None = None
    score_tensors: Mapping[str, torch.Tensor] | None = None
    is_cross_attention: bool = False
    shared_prefixes: Sequence[SharedPrefix] | None = None
    state_slots: torch.Tensor | None = None
    state_sources: torch.Tensor | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                setattr(self, name, as_count(name, value))
        try:
            # Rows of padding write nothing (P4). The caller's tensor is not written.
            # The slots of cross-attention are those of encoder tokens, which have other rows.
            slots, tokens = self.slot_mapping, self.num_actual_tokens
            if slots is not None and not self.is_cross_attention and slots.shape[0] > tokens:
                self.slot_mapping = slots[:tokens]
            check_form(self)
        except (AttributeError, IndexError):
            check_types(self)
            raise

    @classmethod
    @explains_device
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: TableLike | None = None,
        block_size: int | None = None,
        device: torch.device | str | None = None,
        *,
        causal: bool | torch.Tensor | None = None,
        query_bias: torch.Tensor | None = None,
        score_tensors: Mapping[str, torch.Tensor] | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        is_cross_attention: bool = False,
        new_key_lens: Sequence[int] | None = None,
        state_slots: Sequence[int] | torch.Tensor | None = None,
        state_sources: Sequence[int] | torch.Tensor | None = None,
    ) -> CommonAttentionMetadata:
        """A batch from lists of lengths.

        Args:
            query_lens: new tokens of each request, 0 or more.
            seq_lens: context and new tokens of each request (M1).
            block_table: block ids of each request, as lists of any lengths or as a tensor
                `[R, max_blocks]`; None where nothing is cached.
            block_size: tokens per block; required with a block table.
            device: where the kernels run; None means the default device of torch.
            causal, query_bias, score_tensors, is_cross_attention, state_*: see the attributes.
            max_query_len, max_seq_len: upper bounds to store in place of the maxima (CUDA graphs).
            new_key_lens: for cross-attention, the keys of each request that this batch writes: the
                last ones of `seq_lens`, 0 where the encoder output is cached already. None writes
                nothing.

        Raises:
            ContractError: a length or a block id is not an integer or does not fit int32, the
                lengths contradict each other or the upper bounds, or the block table is too narrow
                for them. The message names the request.
        """
        device = torch.get_default_device() if device is None else torch.device(device)
        queries, sequences = checked_lengths(query_lens, seq_lens, is_cross_attention)
        starts = request_starts(queries)
        has_table = block_table is not None
        keys = new_keys(starts, queries, sequences, is_cross_attention, new_key_lens, has_table)
        table = slots = None
        if block_table is not None:
            writes = not is_cross_attention or new_key_lens is not None
            table, slots = table_and_slots(
                block_table, *keys, sequences, block_size, device, write=writes
            )
        return cls(
            **length_fields(device, starts, queries, sequences, max_query_len, max_seq_len),
            block_table_tensor=table,
            slot_mapping=slots,
            causal=causal,
            query_bias=query_bias,
            score_tensors=score_tensors,
            is_cross_attention=is_cross_attention,
            block_size=block_size if has_table else None,
            **state_slot_fields(state_slots, state_sources, queries, sequences, device),
        )

    @property
    def query_lens_cpu(self) -> torch.Tensor:
        """[R] int32 CPU; new tokens of each request.

        Raises:
            ContractError: the batch has no `query_start_loc_cpu`.
        """
        if self.query_start_loc_cpu is None:
            raise ContractError(
                "query_start_loc_cpu is None, but the query lengths are needed on the host: pass it"
            )
        return self.query_start_loc_cpu[1:] - self.query_start_loc_cpu[:-1]

    @property
    def batch_size(self) -> int:
        """R."""
        return self.num_reqs

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """[R] int32 device; context only. No host sync."""
        return self.seq_lens - (self.query_start_loc[1:] - self.query_start_loc[:-1])

    def normalized(self) -> CommonAttentionMetadata:
        """The batch with tensors in the form above; of this class, the batch itself."""
        return self

    def replace(self, **changes: Any) -> CommonAttentionMetadata:
        """A copy with some fields changed. Tensors are shared and not written. The block size of
        another block table or of other slots is not known unless it is given too."""
        if changes.keys() & {"block_table_tensor", "slot_mapping"}:
            changes.setdefault("block_size", None)
        return replace(self, **changes)

    def unpadded(self, num_reqs: int, num_actual_tokens: int) -> CommonAttentionMetadata:
        """The first `num_reqs` requests of a batch that was padded for a CUDA graph, as views."""
        tokens = slice(0, as_count("num_actual_tokens", num_actual_tokens))
        return slice_batch(self, slice(0, as_count("num_reqs", num_reqs)), tokens, tokens)

    def slice_requests(self, first: int, end: int) -> CommonAttentionMetadata:
        """Requests `[first, end)` as a batch, for micro-batches. Its rows of q, k and v are those
        of its tokens, `query_start_loc_cpu[first]` to `query_start_loc_cpu[end]`.

        Tensors are views, except `query_start_loc` of a slice that does not begin at request 0.
        Upper bounds become those of the slice where the host has the lengths.

        Raises:
            ContractError: a range outside the batch, no `query_start_loc_cpu`, or cross-attention
                that writes keys, whose rows belong to no request.
        """
        first, end = as_id("first", first), as_id("end", end)
        if not 0 <= first <= end <= self.num_reqs:
            raise ContractError(
                f"requests [{first}, {end}) are not a range of the {self.num_reqs} requests"
            )
        if self.is_cross_attention and self.slot_mapping is not None:
            raise ContractError(
                "a batch of cross-attention with slot_mapping cannot be sliced: run the layer once "
                "for the whole batch to write the keys, then slice with slot_mapping=None"
            )
        lengths = self.query_lens_cpu[first:end]
        assert self.query_start_loc_cpu is not None  # `query_lens_cpu` checks it
        tokens = slice(int(self.query_start_loc_cpu[first]), int(self.query_start_loc_cpu[end]))
        part = slice_batch(self, slice(first, end), tokens, tokens)
        part.max_query_len = min(self.max_query_len, largest(lengths))
        if part.seq_lens_cpu is not None:
            part.max_seq_len = min(self.max_seq_len, largest(part.seq_lens_cpu))
        return part
