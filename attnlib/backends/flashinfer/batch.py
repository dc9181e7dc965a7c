"""A batch for FlashInfer: its metadata, and what follows from its lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from attnlib.backends.flashinfer.plans import Lease, PlanKey
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.spec import AttentionSpec

__all__ = [
    "FlashInferMetadata",
    "check_batch_form",
    "graph_id",
    "leading_single_tokens",
    "plan_key",
    "scratch_bytes",
]


def plan_key(parameters: PerLayerParameters) -> PlanKey:
    """The parameters of a layer that its plan depends on; the scale is an argument of `run`."""
    return PlanKey(
        parameters.window_left,
        0 if parameters.window_right == 0 else -1,
        parameters.logits_soft_cap or None,
    )


@dataclass(kw_only=True)
class FlashInferMetadata(PagedMetadata):
    """A batch for FlashInfer.

    Attributes:
        num_unpadded_tokens: tokens of requests, without the padding of a graph's batch; None if
            only the device knows it (capture).
        decode_plans: key -> planned decode wrapper for the first `num_decode_tokens` rows; empty
            without decodes.
        prefill_plans: key -> planned prefill wrapper for the other rows; empty without prefills.
        common: the batch that it was built from, to plan again with other blocks.
        scratch: uint8 on the device, for one layer's contiguous output and LSE; shared by all
            layers.
    """

    fixed_fields: ClassVar[frozenset[str]] = frozenset(
        {"query_start_loc", "seq_lens", "block_table", "causal", "max_query_len", "max_seq_len"}
    )

    num_unpadded_tokens: int | None
    decode_plans: Mapping[PlanKey, Lease] = field(default_factory=dict)
    prefill_plans: Mapping[PlanKey, Lease] = field(default_factory=dict)
    common: CommonAttentionMetadata
    scratch: torch.Tensor


def scratch_bytes(spec: AttentionSpec, num_tokens: int) -> int:
    """Bytes for one layer's contiguous output and float32 LSE, both aligned to 256 bytes, and, in
    the end, one for each token."""
    rows = num_tokens * spec.num_heads
    size = -(-rows * spec.head_size_v * spec.dtype.itemsize // 256) * 256
    return size + rows * 4 + num_tokens


def graph_id(common: CommonAttentionMetadata) -> tuple[int, int]:
    """Identifies a captured batch: its number of requests and the address of its `seq_lens`."""
    return common.num_reqs, common.seq_lens.data_ptr()


def leading_single_tokens(common: CommonAttentionMetadata) -> int:
    """The number of leading requests with exactly one query token.

    In a padded batch of a graph (one row per request, empty requests last) all requests count.
    """
    lengths = common.query_lens_cpu.numpy()
    others = np.flatnonzero(lengths != 1)
    first = int(others[0]) if len(others) else len(lengths)
    padded = common.num_actual_tokens == common.num_reqs and not lengths[first:].any()
    return common.num_reqs if padded else first


def check_batch_form(common: CommonAttentionMetadata) -> None:
    if isinstance(common.causal, torch.Tensor):
        raise ContractError(
            "flashinfer takes one causal flag per batch, not one per request: "
            "choose triton or torch for mask_kind=per_request"
        )
    if common.query_bias is not None:
        raise ContractError(
            "flashinfer does not support query_bias: "
            "choose triton or torch for mask_kind=query_bias"
        )
