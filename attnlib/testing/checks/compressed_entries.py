"""S3: own keys and compressed entries are under one softmax (M17).

Entries that no query sees hold poison, and the blocks without a visible entry are invalid. A sink
that counts in both streams, an entry that is visible before its tokens are complete, a list that is
ignored, or a softmax for each stream give other results than the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.compressed_entries import Entries, expected_result, make_entries
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.runner import AttentionOutput, check_supported, make_impl

__all__ = ["CHECKS", "attend_to_both"]

_BATCHES = {
    "decode": "q1s37_q1s5_q1s150_q4s80",
    "prefill": "q23_q17s70",
    "mixed": "q1s90_q19s44_q2s2_q40",
    "padding": "q1s40_q5s33_q0s0_pad3",
}
_FORMS = {
    # name: (compress_rate, block_size, max_selected)
    "all": (4, 8, 0),
    "selected": (4, 8, 5),
    "one_token": (1, 16, 6),
    "many_tokens": (16, 4, 0),
}
_BASE: dict[str, object] = {"sinks": True, "sliding_window": 13, "needs_lse": True}
_LATENTS: dict[str, object] = {"use_mla": True, "num_kv_heads": 1, "layout": "ALIASED"}
_FEATURES: dict[str, dict[str, object]] = {
    "no_sinks": {"sinks": False},
    "no_window": {"sliding_window": None},
    "soft_cap": {"logits_soft_cap": 3.0},
    "scale": {"scale": 0.3},
    "no_lse": {"needs_lse": False},
    "mla": {**_LATENTS, "head_size": 64, "head_size_v": 64},
    "mla_512": {
        **_LATENTS,
        "num_heads": 8,
        "head_size": 512,
        "head_size_v": 512,
        "block_size": 64,
    },
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.25},
    "HND": {"layout": "HND"},
}
_QUICK = {"all": ("mixed",), "selected": ("decode",), "many_tokens": ("padding",)}
"""Form -> batches of the short run."""


def attend_to_both(
    backend: type[AttentionBackend], step: MaterializedCase, entries: Entries
) -> AttentionOutput:
    """Attend to the layer's own keys and to the entries."""
    query = step.inputs.query
    metadata = backend.make_builder(step.spec, query.device).build(0, step.common())
    lse = None
    if step.case.needs_lse:
        lse = torch.full(query.shape[:2], float("nan"), dtype=torch.float32, device=query.device)
    out = step.inputs.out
    make_impl(backend, step).forward_compressed(
        query, step.cache(), metadata, entries.of_call(step), out, lse
    )
    return AttentionOutput(out, lse)


def _check(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device)
    entries = make_entries(step, target.device)
    output = attend_to_both(target.backend, step, entries)
    out, lse = output.out, output.lse
    expected = expected_result(step, entries)
    same_precision = expected_result(step, entries, case.torch_dtype)
    found = [compare(out, expected[0], same_precision[0], case.torch_dtype, "out")]
    if lse is not None:
        found.append(compare(lse, expected[1], same_precision[1], case.torch_dtype, "lse"))
    errors = [str(comparison) for comparison in found if not comparison.passed]
    if out[case.batch_spec.num_actual_tokens :].any():
        errors.append("padding rows must be exactly 0 (M6)")
    return f"{'; '.join(errors)} | case: {case}" if errors else ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for form, fields in _FORMS.items():
        for phase, batch in _BATCHES.items():
            if target.quick and phase not in _QUICK.get(form, ()):
                continue
            case = target.case(**{"batch": batch, "compressed": fields, **_BASE})
            yield CheckCase(f"{form}-{phase}", partial(_check, target, case), case)
    for feature, changes in _FEATURES.items():
        if target.quick and feature not in ("mla", "fp8"):
            continue
        for form in ("all", "selected") if not target.quick else ("selected",):
            changed = {
                "batch": _BATCHES["mixed"],
                "compressed": _FORMS[form],
                **_BASE,
                **changes,
            }
            case = target.case(**changed)
            yield CheckCase(f"{feature}-{form}", partial(_check, target, case), case)


CHECKS = (Check("S3", "own keys and compressed entries are under one softmax", _cases),)
