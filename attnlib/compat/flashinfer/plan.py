"""What `plan` was given: the form of the layers, and the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnlib.compat.flashinfer.arguments import flag, integer, number
from attnlib.compat.flashinfer.page import page_table
from attnlib.compat.flashinfer.page_lists import PageLists
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, MaskKind, Window

__all__ = ["LayerForm", "Plan", "batch_of"]

_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class LayerForm:
    """The sizes and options of a plan; attributes as the arguments of `plan`.

    Attributes:
        head_sizes: elements of one key head and of one value head.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_sizes: tuple[int, int]
    page_size: int
    causal: bool
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    q_data_type: torch.dtype
    kv_data_type: torch.dtype

    def __post_init__(self) -> None:
        assign = object.__setattr__
        for name in ("num_qo_heads", "num_kv_heads", "page_size"):
            assign(self, name, integer(name, getattr(self, name), 1))
        assign(self, "head_sizes", tuple(integer("head_dim", n, 1) for n in self.head_sizes))
        assign(self, "causal", flag("causal", self.causal))
        assign(self, "window_left", integer("window_left", self.window_left, -_INT32))
        for name in ("logits_soft_cap", "sm_scale"):
            if (value := getattr(self, name)) is not None:
                assign(self, name, number(name, value))

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.head_sizes[0] ** -0.5 if self.sm_scale is None else self.sm_scale

    def spec(self, is_single: bool) -> AttentionSpec:
        """The spec of the layers.

        Args:
            is_single: no request has more than one query. It is the last position, so that every
                mask is causal.
        """
        causal, left = self.causal or is_single, self.window_left
        return AttentionSpec(
            num_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_sizes[0],
            head_size_v=self.head_sizes[1],
            dtype=self.q_data_type,
            kv_cache_dtype=self.kv_data_type,
            block_size=self.page_size,
            needs_lse=True,
            mask_kind=MaskKind.CAUSAL if causal else MaskKind.BIDIRECTIONAL,
            sliding_window=left + 1 if causal and left >= 0 else None,
            window=Window(left, None) if not causal and left >= 0 else None,
            logits_soft_cap=self.logits_soft_cap or None,
        )


@dataclass(frozen=True)
class Plan:
    """A planned batch.

    Attributes:
        form: of the layers.
        spec: of the layers.
        lists: page lists of the batch.
        common: the batch.
    """

    form: LayerForm
    spec: AttentionSpec
    lists: PageLists
    common: CommonAttentionMetadata

    def with_form(self, form: LayerForm) -> Plan:
        """The same batch for layers of another form."""
        spec = form.spec(self.lists.longest_query <= 1)
        return replace(self, form=form, spec=spec)


def batch_of(lists: PageLists, device: torch.device) -> CommonAttentionMetadata:
    """The batch of page lists, with a block table of its own."""
    starts, ends, lengths, pages = (
        x.to(device, torch.int32, non_blocking=True)
        for x in (lists.query_starts, lists.page_starts, lists.lengths, lists.pages)
    )
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=lists.query_starts,
        seq_lens=lengths,
        seq_lens_cpu=lists.lengths,
        num_computed_tokens_cpu=(lists.lengths - lists.query_starts.diff()).clamp(min=0),
        num_reqs=lists.num_reqs,
        num_actual_tokens=lists.num_tokens,
        max_query_len=lists.longest_query,
        max_seq_len=int(lists.lengths.max()) if lists.num_reqs else 0,
        block_table_tensor=page_table(ends, pages, lists.longest_row),
    )
