"""A case with its tensors, in the form that backends and the oracle take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.cache.views import recognized_layout
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.score_functions.query_tensors import QUERY_ROW, QueryTensors
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec
from attnlib.testing.block_placement import place_blocks
from attnlib.testing.inputs import StepInputs, make_inputs
from attnlib.testing.oracle import OracleParams, OracleResult, unpaged_attention

if TYPE_CHECKING:
    from attnlib.testing.case import Case

__all__ = ["MaterializedCase", "materialize_case"]

_LOOSE_QUERY, _LOOSE_SEQUENCE = 3, 1000
"""What loose bounds add to the longest query and sequence, as an engine that gives its limits."""


@dataclass(frozen=True)
class MaterializedCase:
    """A case with its tensors.

    Attributes:
        case: the configuration.
        spec: the layer's spec.
        inputs: the tensors.
        params: the parameters of the oracle.
        given_score_tensors: the tensors of the score function by name; None for those of the case.
        given_query_tensors: the tensors of the query tokens; None for those of the case.
    """

    case: Case
    spec: AttentionSpec
    inputs: StepInputs
    params: OracleParams
    given_score_tensors: Mapping[str, torch.Tensor] | None = None
    given_query_tensors: QueryTensors | None = None

    def cache(self) -> PagedKVCache:
        """The cache as a `PagedKVCache` over the same memory."""
        views = (self.inputs.cache.key, self.inputs.cache.value)
        cache = PagedKVCache(
            *views,
            layout=recognized_layout(*views),
            k_scale=self.params.k_scale,
            v_scale=self.params.v_scale,
            formats=(self.spec.kv_format, self.spec.value_format),
        )
        cache.rotation = self.spec.kv_rotation
        return cache

    def common(self) -> CommonAttentionMetadata:
        """The batch metadata. The block table keeps its invalid entries."""
        inputs, batch = self.inputs, self.inputs.batch
        starts, seq_lens = inputs.query_start_loc.cpu(), inputs.seq_lens.cpu()
        loose, causal = self.case.loose_bounds, self.params.causal
        return CommonAttentionMetadata(
            query_start_loc=inputs.query_start_loc,
            query_start_loc_cpu=starts,
            seq_lens=inputs.seq_lens,
            seq_lens_cpu=seq_lens,
            num_computed_tokens_cpu=(seq_lens - (starts[1:] - starts[:-1])).clamp(min=0),
            num_reqs=batch.num_reqs,
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len + (_LOOSE_QUERY if loose else 0),
            max_seq_len=batch.max_seq_len + (_LOOSE_SEQUENCE if loose else 0),
            block_table_tensor=inputs.block_table if self.case.is_paged else None,
            slot_mapping=inputs.slot_mapping.clone() if self.case.attn_type == "decoder" else None,
            # A recorded batch may be bidirectional on a causal layer.
            causal=None if causal is self.spec.is_causal else causal,
            query_bias=self.params.query_bias,
            score_tensors=self._batch_tensors() or None,
            is_cross_attention=self.case.attn_type == "encoder_decoder",
        )

    def _batch_tensors(self) -> dict[str, torch.Tensor]:
        """The batch tensors that a caller gives: the builder makes the rows of queries (M21)."""
        given = self.score_tensors("batch_tensors")
        return {name: tensor for name, tensor in given.items() if name != QUERY_ROW}

    def score_tensors(self, kind: str = "layer_tensors") -> dict[str, torch.Tensor]:
        """The tensors of the score function on the device of the inputs, by name.

        Args:
            kind: "layer_tensors", "batch_tensors" or "query_tensors".
        """
        function, device = self.spec.score_function, self.inputs.query.device
        names = () if function is None else getattr(function, kind)
        tensors = self.given_score_tensors
        if tensors is None:
            tensors = self.case.score_tensors
        return {name: tensors[name].to(device) for name in names}

    def query_tensors(self) -> QueryTensors | None:
        """The tensors of the query tokens on the device of the inputs, with poison in the rows past
        the tokens of the batch; None for layers without any."""
        if not self.spec.has_query_tensors or self.given_query_tensors is not None:
            return self.given_query_tensors
        tensors = self.score_tensors("query_tensors")
        for name, tensor in tensors.items():
            tensors[name] = tensor.clone()
            if tensor.is_floating_point():
                tensors[name][self.inputs.batch.num_actual_tokens :] = math.nan
        return QueryTensors(tensors, self.params.sinks if self.case.token_sinks else None)

    def selected_keys(self) -> SelectedKeys | None:
        """The lists of selected keys on the device of the inputs; None without a selection."""
        lists = self.case.key_lists
        return None if lists is None else lists.to(self.inputs.query.device)

    def oracle(self, precision: torch.dtype = torch.float64) -> OracleResult:
        """The expected result, computed in `precision`."""
        if self.case.is_paged:
            return self.inputs.oracle(self.params, precision)
        tensors, starts = self.inputs, self.inputs.query_start_loc
        return unpaged_attention(
            tensors.query, tensors.key, tensors.value, starts, starts, self.params, precision
        )

    def modify_inputs(self, modify: Callable[[StepInputs], None]) -> MaterializedCase:
        """Let `modify` change the tensors in place; returns self."""
        modify(self.inputs)
        return self


def materialize_case(
    case: Case, device: torch.device | str = "cpu", *, kv_written: bool = True
) -> MaterializedCase:
    """Create the tensors of a case.

    Args:
        case: the configuration.
        device: where to allocate the tensors.
        kv_written: the cache already holds this step's keys and values.
    """
    params = case.oracle_params(device)
    placement = place_blocks(
        case.batch_spec,
        case.block_size,
        case.placement,  # type: ignore[arg-type]
        seed=case.seed,
        extra_columns=case.extra_columns,
        garbage=case.garbage,  # type: ignore[arg-type]
        guarded=case.guarded,
        hidden_columns=case.hidden_columns,
    )
    inputs = make_inputs(
        case.batch_spec,
        case.dimensions,
        placement,
        seed=case.seed,
        layout=case.layout,
        device=device,
        poison=case.poison,
        kv_written=kv_written,
        k_scale=params.k_scale,
        v_scale=params.v_scale,
        contiguous=case.contiguous,
    )
    if inputs.cache.scales is not None:  # the scales are in the pages
        params = replace(params, k_scale=inputs.cache.scales[0], v_scale=inputs.cache.scales[1])
    return MaterializedCase(case, case.spec, inputs, params)
