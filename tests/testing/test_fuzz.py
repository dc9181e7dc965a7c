"""Property-based tests: hypothesis draws specs and batches.

Each draw passes or is unsupported with a reason. The draws include sizes, combinations of features
and batches that the conformance suite does not contain.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.selection import get_attn_backend
from attnlib.testing.batch_spec import BatchSpec, parse_batch
from attnlib.testing.block_placement import PLACEMENTS
from attnlib.testing.case import Case
from attnlib.testing.layouts import CACHE_LAYOUTS
from attnlib.testing.runner import compare_with_oracle, run_case
from tests.testing.toy_backend import toy_with
from tests.testing.wrong_backends import OffByOneWindow

DRAWS = int(os.environ.get("ATTNLIB_FUZZ_DRAWS", "60"))
RELAXED = settings(
    max_examples=DRAWS,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@st.composite
def batches(draw: Any) -> str:
    """Up to six requests with 0 to 20 query tokens and contexts of 0 to 60 tokens; padding rows."""
    requests = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), max_size=6))
    batch = BatchSpec(
        tuple(query for query, _ in requests),
        tuple(query + context for query, context in requests),
        draw(st.integers(0, 3)),
    )
    return str(batch)


@st.composite
def cases(draw: Any) -> Case:
    """Any case that a spec accepts, including unsupported combinations."""
    causal = draw(
        st.sampled_from(["causal", "causal", "bidirectional", "per_request", "query_bias"])
    )
    cache = draw(st.sampled_from(["auto", "auto", "auto", "fp8_e4m3", "fp8_e5m2", "bfloat16"]))
    counts = causal != "query_bias"  # such a layer has nothing that counts positions (M3)
    window = draw(st.sampled_from([None, None, "sliding", "general"])) if counts else None
    side = st.one_of(st.none(), st.integers(0, 30))
    return Case(
        batch=draw(batches()),
        seed=draw(st.integers(0, 10**6)),
        num_kv_heads=(kv := draw(st.sampled_from([1, 2, 3]))),
        num_heads=kv * draw(st.sampled_from([1, 2, 3, 5, 7, 8])),
        head_size=draw(st.sampled_from([8, 16, 24, 32, 40, 64, 72])),
        head_size_v=draw(st.sampled_from([None, None, 16, 48])),
        block_size=draw(st.sampled_from([1, 8, 16, 17, 24, 32, 64])),
        dtype=draw(st.sampled_from(["float32", "float32", "float16", "bfloat16", "float64"])),
        kv_cache_dtype=cache,
        kv_scale_kind=draw(st.sampled_from(["tensor", "head"]))
        if cache.startswith("fp8")
        else "tensor",
        k_scale=draw(st.sampled_from([1.0, 0.125])) if cache.startswith("fp8") else 1.0,
        v_scale=draw(st.sampled_from([1.0, 0.0625])) if cache.startswith("fp8") else 1.0,
        scale=draw(st.sampled_from([None, 0.05, 1.0])),
        mask=causal,
        sliding_window=draw(st.integers(1, 40)) if window == "sliding" else None,
        window=(draw(side), draw(side)) if window == "general" else None,
        attention_chunk_size=draw(st.sampled_from([None, None, 1, 8, 33])) if counts else None,
        logits_soft_cap=draw(st.sampled_from([None, None, 0.5, 20.0])),
        alibi=draw(st.booleans()) and counts,
        sinks=draw(st.booleans()),
        needs_lse=draw(st.booleans()),
        layout=draw(st.sampled_from(CACHE_LAYOUTS)),
        placement=draw(st.sampled_from(PLACEMENTS)),
        garbage=draw(st.sampled_from(["plausible", "minus_one", "huge"])),
        extra_columns=draw(st.integers(0, 2)),
        poison=draw(st.sampled_from(["zero", "nan", "inf", "huge"])),
        contiguous=draw(st.booleans()),
        batch_invariant=draw(st.sampled_from([False, False, False, True])),
    )


def passes_or_is_unsupported(case: Case, backend: Any) -> str:
    """ "passed" or the reasons; raises for any other outcome."""
    try:
        chosen = get_attn_backend(case.spec, backend, "cpu")
    except UnsupportedConfigError as error:
        assert error.reasons and all(error.reasons)
        return str(error)
    wrong = compare_with_oracle(case, run_case(chosen, case, "cpu"), "cpu")
    assert not wrong, f"{chosen.get_name()}: {wrong}"
    return "passed"


@RELAXED
@given(cases())
def test_the_torch_backend_passes_every_draw(case: Case) -> None:
    """The reference backend supports every spec."""
    assert passes_or_is_unsupported(case, "torch") == "passed"


@RELAXED
@given(cases())
def test_automatic_selection_passes_or_gives_a_reason(case: Case) -> None:
    passes_or_is_unsupported(case, None)


@RELAXED
@given(cases())
def test_a_restricted_backend_passes_or_gives_a_reason(case: Case) -> None:
    """A backend is never run on more than it declares."""
    from attnlib.capabilities import Sizes

    restricted = toy_with(
        alibi=False, sink=False, block_sizes=Sizes(multiple_of=8), dtypes=(torch.float32,)
    )
    outcome = passes_or_is_unsupported(case, restricted)
    if case.alibi:
        assert "ALiBi" in outcome


@RELAXED
@given(batches())
def test_batches_parse_to_themselves(text: str) -> None:
    assert str(parse_batch(text)) == text


def test_fuzzing_finds_a_wrong_backend() -> None:
    """A window that is off by one fails within the draws."""

    # Without the shrink phase: only the failure matters, not its smallest example.
    @settings(RELAXED, phases=[Phase.generate])
    @given(cases())
    def run(case: Case) -> None:
        passes_or_is_unsupported(case, toy_with(OffByOneWindow, batch_invariant=True))

    with pytest.raises(AssertionError, match="over budget|wrong infinity"):
        run()


@pytest.mark.parametrize(
    "changes", [{"num_heads": 5}, {"sliding_window": 0}, {"window": (-1, 2)}, {"head_size": 0}]
)
def test_invalid_specs_raise_before_anything_runs(changes: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        _ = Case(num_kv_heads=2).replace(**changes).spec
