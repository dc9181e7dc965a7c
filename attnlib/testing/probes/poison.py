"""N1: does anything leak from memory that nobody may read?

The same case runs twice, once over zeros and once over poison: NaN, infinities or the largest finite number in every
cache element outside the sequences (block tails and strangers' blocks), in the padding rows of q, k, v, in the output
buffers, in every table entry past a request's blocks, and in what the backend itself allocates without filling. The
bits must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnlib.testing.backend_under_test import Subject
from attnlib.testing.budget import compare_bits
from attnlib.testing.case import Case
from attnlib.testing.outcome import Refused
from attnlib.testing.poison import poisoned_allocations
from attnlib.testing.probe import Check, Probe
from attnlib.testing.runner import run_case

__all__ = ["PROBES"]

_FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "sinks": {"sinks": True},
    "bidirectional": {"mask": "bidirectional"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5},
}


def _check(subject: Subject, case: Case) -> str:
    if subject.backend.capabilities.needs_finite_cache and case.poison != "huge":
        raise Refused(["needs_finite_cache is declared: unused cache elements must be finite (P5)"])
    clean = run_case(subject.backend, case.but(poison="zero"), subject.device)
    with poisoned_allocations():
        poisoned = run_case(subject.backend, case, subject.device)
    findings = [compare_bits(poisoned.out, clean.out, "out")]
    if poisoned.lse is not None and clean.lse is not None:
        findings.append(compare_bits(poisoned.lse, clean.lse, "lse"))
    wrong = [str(finding) for finding in findings if not finding.passed]
    return (
        f"{case.poison} in unused memory changes the result: {'; '.join(wrong)} | case: {case}"
        if wrong
        else ""
    )


def _cases(subject: Subject) -> Iterator[tuple[str, Case]]:
    for kind in ("nan", "huge") if subject.quick else ("nan", "inf", "huge"):
        for batch in (
            ("mixed", "page_edges")
            if subject.quick
            else ("mixed", "page_edges", "decode_long", "empty_rows")
        ):
            yield f"{kind}-{batch}", subject.case(batch=batch, poison=kind)
    for name, features in _FEATURES.items():
        if name != "plain" and not (subject.quick and name in ("sinks", "fp8")):
            yield f"nan-{name}", subject.case(batch="mixed", poison=subject.base.poison, **features)
    for layout in ("NHD_PACKED", "HND"):
        yield f"nan-{layout}", subject.case(batch="page_edges", layout=layout)
    yield "table-minus-one", subject.case(batch="ragged", garbage="minus_one", extra_columns=3)
    yield "padding-rows", subject.case(batch="graph_padding")


def _poison(subject: Subject) -> Iterator[Check]:
    for name, case in _cases(subject):
        yield Check(name, lambda case=case: _check(subject, case), case)  # type: ignore[misc]


PROBES = (Probe("N1", "nothing leaks from unused memory", _poison),)
