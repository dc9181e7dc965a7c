"""Tensors and sinks of query tokens (M21, M22) in layers, against attention by hand."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.metadata.state import AttentionState
from attnlib.score_functions import QueryTensors, ScoreFunction, lookup, query_row
from attnlib.score_functions.builtin import relative_logits
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

HEADS, SIZE, EXTENT = 4, 16, 5
FUNCTION = relative_logits(EXTENT)
SPEC = AttentionSpec(
    num_heads=HEADS,
    num_kv_heads=2,
    head_size=SIZE,
    dtype=torch.float32,
    score_function=FUNCTION,
    token_sinks=True,
    block_size=4,
)
QUERY_LENS, SEQ_LENS = [1, 3, 7], [9, 3, 20]
TOKENS = sum(QUERY_LENS)


class Step:
    """A batch of three requests, and what a layer call over it takes."""

    def __init__(self, spec: AttentionSpec = SPEC, backend: str = "torch") -> None:
        draw = torch.Generator().manual_seed(3)
        self.spec, self.layer = spec, attnlib.Attention(spec, backend=backend, device="cpu")
        self.cache = attnlib.PagedKVCache.allocate(spec, 12, "cpu")
        for part in (self.cache.key_cache, self.cache.value_cache):
            part.copy_(torch.randn(part.shape, generator=draw))
        self.table = torch.randperm(12, generator=draw).int()[:9]
        self.table = torch.stack([self.table[i : i + 5] for i in (0, 2, 4)])
        self.common = attnlib.CommonAttentionMetadata.from_lengths(
            QUERY_LENS, SEQ_LENS, self.table, spec.block_size
        ).replace(slot_mapping=None)
        builder = self.layer.backend.make_builder(spec, torch.device("cpu"))
        self.metadata = builder.build(0, self.common)
        self.query = torch.randn(TOKENS, HEADS, SIZE, generator=draw)
        self.rel = torch.randn(TOKENS, HEADS * EXTENT, generator=draw)
        self.sinks = torch.randn(TOKENS, HEADS, generator=draw)

    def call(self, given: Any) -> torch.Tensor:
        states = (self.query, None, None, self.cache, self.metadata)
        out: torch.Tensor = self.layer(*states, query_tensors=given)
        return out

    def expected(self) -> torch.Tensor:
        """Row by row, head by head, key by key."""
        out, row = torch.zeros(TOKENS, HEADS, SIZE), 0
        pages = self.cache.key_cache, self.cache.value_cache
        for request, (new, length) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
            keys, values = (x[self.table[request].long()].flatten(0, 1).double() for x in pages)
            for i in range(new):
                position = length - new + i
                for head in range(HEADS):
                    scores = keys[: position + 1, head // 2] @ self.query[row, head].double()
                    scores = scores * SIZE**-0.5
                    for distance in range(min(EXTENT, position + 1)):
                        bias = self.rel[row, head * EXTENT + distance]
                        scores[position - distance] += bias
                    weights = torch.cat([scores, self.sinks[row, head].double()[None]]).softmax(0)
                    out[row, head] = (weights[:-1] @ values[: position + 1, head // 2]).float()
                row += 1
        return out


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_layer_against_attention_by_hand(backend: str) -> None:
    step = Step(backend=backend)
    out = step.call(QueryTensors({"rel": step.rel}, step.sinks))
    torch.testing.assert_close(out, step.expected())
    half = step.rel.bfloat16()
    step.rel, step.sinks = half.float(), step.sinks + 1.0
    torch.testing.assert_close(step.call(QueryTensors({"rel": half}, step.sinks)), step.expected())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_a_batch_invariant_layer_have_equal_bits(backend: str) -> None:
    """M15: alone, in a batch, and in chunks."""
    step = Step(SPEC.replace(batch_invariant=True), backend)
    whole = step.call(QueryTensors({"rel": step.rel}, step.sinks))
    first = 0
    for request, (new, length) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
        for begin, end in ((0, new), (0, 1), (new - 1, new)):
            common = attnlib.CommonAttentionMetadata.from_lengths(
                [end - begin], [length - new + end], step.table[request : request + 1], 4
            ).replace(slot_mapping=None)
            builder = step.layer.backend.make_builder(step.spec, torch.device("cpu"))
            rows = slice(first + begin, first + end)
            out = step.layer(
                *(step.query[rows], None, None, step.cache, builder.build(0, common)),
                query_tensors=QueryTensors({"rel": step.rel[rows]}, step.sinks[rows]),
            )
            assert torch.equal(out, whole[rows]), (request, begin, end)
        first += new


def row(**changes: Any) -> QueryTensors:
    given: dict[str, Any] = {"rel": torch.zeros(TOKENS, HEADS * EXTENT)}
    sinks = changes.pop("sinks", torch.zeros(TOKENS, HEADS))
    return QueryTensors({**given, **changes}, sinks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"query_tensors is missing, but the spec has token_sinks=True.*\[M21\]"),
        (QueryTensors({}, torch.zeros(TOKENS, HEADS)), "needs the query tensor 'rel'"),
        (row(other=torch.zeros(TOKENS, 1)), "'other' is given, and score function"),
        (row(rel=torch.zeros(TOKENS - 1, 20)), f"has {TOKENS - 1} rows, but the batch has"),
        (row(rel=torch.zeros(TOKENS, 20).double()), "torch.float64; kernels index"),
        (row(rel=torch.zeros(TOKENS, 20).long()), "it must be int32 or floating point"),
        (row(rel=torch.zeros(20, TOKENS).T), r"it must be contiguous, \[tokens, m\]"),
        (row(rel=torch.zeros(TOKENS, 20, device="meta")), "is on meta, query on cpu"),
        (row(sinks=None), "sinks of the query tokens are missing"),
        (row(sinks=torch.zeros(HEADS)), r"must be floating-point \[tokens, 4\]"),
        (row(sinks=torch.zeros(TOKENS, HEADS).int()), r"must be floating-point \[tokens, 4\]"),
        (row(sinks=torch.zeros(HEADS, TOKENS).T), "call .contiguous()"),
    ],
)
def test_wrong_tensors_are_refused(given: Any, message: str) -> None:
    step = Step()
    with pytest.raises(ContractError, match=message):
        step.call(given)


@pytest.mark.parametrize("name", ["rel", "sinks"])
def test_gradients_are_refused(name: str) -> None:
    """As those of queries: the result would have none."""
    step = Step()
    getattr(step, name).requires_grad_()
    given = QueryTensors({"rel": step.rel}, sinks=step.sinks)
    with torch.enable_grad(), pytest.raises(ContractError, match="requires a gradient"):
        step.call(given)
    with torch.no_grad():
        assert step.call(given).shape == step.query.shape


def test_tensors_that_the_spec_does_not_declare_are_refused() -> None:
    plain = Step(SPEC.replace(score_function=None, token_sinks=False))
    with pytest.raises(ContractError, match="query_tensors is a QueryTensors, but the spec has"):
        plain.call(row())
    only = Step(SPEC.replace(token_sinks=False))
    with pytest.raises(ContractError, match="token_sinks=False"):
        only.call(row())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"has_sink": True}, r"has_sink=True with token_sinks=True: a row has one sink.*\[M22\]"),
        ({"use_mla": True, "num_kv_heads": 1}, "latents have no tensors of query tokens"),
    ],
)
def test_specs_that_no_layer_can_have(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        SPEC.replace(**fields)


def test_a_function_with_too_many_tensors() -> None:
    with pytest.raises(ContractError, match="5 tensors, and kernels take at most 4"):
        ScoreFunction(_none, layer_tensors=("a", "b"), query_tensors=("c", "d"))


def _none(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score + lookup(aux.c, query_row(aux.query_row, request, q_pos), head)


def test_a_backend_that_states_nothing_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedConfigError, match="sinks of query tokens"):
        attnlib.get_attn_backend(SPEC, "prefill:torch,decode:triton", "cpu")


def test_padded_batches_of_a_graph_have_the_rows_of_their_queries() -> None:
    limits = BatchLimits(max_num_reqs=6, max_num_tokens=18, max_seq_len=24)
    step = Step()
    builder = step.layer.backend.make_builder(SPEC, torch.device("cpu"), limits=limits)
    state = AttentionState(builder, limits)
    common = attnlib.CommonAttentionMetadata.from_lengths([1, 3], [9, 7], step.table[:2], 4)
    padded = state.begin_forward(common, 4, 3)
    assert padded.score_tensors is not None
    assert padded.score_tensors["query_row"][:2].tolist() == [[0 - 8], [1 - 4]]
    again = state.begin_forward(common, 4, 3).score_tensors
    assert again is not None
    assert again["query_row"].data_ptr() == padded.score_tensors["query_row"].data_ptr()


def test_warmup_runs_layers_with_query_tensors() -> None:
    step = Step()
    attnlib.warmup(
        step.layer, step.cache, BatchLimits(max_num_reqs=4, max_num_tokens=16, max_seq_len=32)
    )
