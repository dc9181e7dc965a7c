"""Cases and captured calls for the tests of record and replay."""

from __future__ import annotations

from attnlib.debug.record import capture_call
from attnlib.testing.case import Case
from attnlib.testing.materialized_case import MaterializedCase
from tests.testing.toy_backend import ToyBuilder

CASES = {
    "mixed": Case(batch="mixed", needs_lse=True),
    "window": Case(batch="ragged", sliding_window=5, layout="NHD_INTERLEAVED"),
    "sinks": Case(batch="decode", sinks=True, alibi=True, logits_soft_cap=2.0, layout="HND"),
    "fp8": Case(
        batch="mixed", kv_cache_dtype="fp8_e4m3", kv_scale_kind="head", k_scale=0.25, v_scale=0.5
    ),
    "padding": Case(batch="graph_padding", layout="NHD_PACKED", mask="per_request"),
    "score": Case(batch="mixed", score="attnlib.testing.score_functions:REQUESTS"),
    "score_with_constants": Case(
        batch="chunked",
        score="attnlib.score_functions.builtin:block_diffusion",
        mask="bidirectional",
    ),
    "bfloat16": Case(batch="chunked", dtype="bfloat16"),
}


def captured(case: Case, *, kv_written: bool = True) -> MaterializedCase:
    """The case as a call captured from the toy backend."""
    step = case.materialize(kv_written=kv_written)
    metadata = ToyBuilder(step.spec, "cpu").build(0, step.common())
    inputs = step.inputs
    return capture_call(
        step.spec,
        inputs.query,
        inputs.key,
        inputs.value,
        step.cache(),
        metadata,
        scale=step.params.scale,
        alibi_slopes=step.params.alibi_slopes,
        sinks=step.params.sinks,
        score_tensors=step.score_tensors(),
        kv_written=kv_written,
    )
