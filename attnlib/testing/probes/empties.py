"""N2-N4: rows, requests and tiles with nothing in them.

N2: a request without keys, without queries, a batch without requests or tokens; the neighbours must not notice.
N3: rows past the batch's tokens are exactly 0, whatever the buffer held.
N4: windows and chunks that leave the first or the last tile of keys fully masked for some rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from attnlib.testing.backend_under_test import Subject
from attnlib.testing.case import Case
from attnlib.testing.probe import Check, Probe
from attnlib.testing.runner import judge, run_case

__all__ = ["PROBES"]


def _judged(subject: Subject, case: Case) -> str:
    return judge(case, run_case(subject.backend, case, subject.device), subject.device)


def _exact(subject: Subject, case: Case) -> str:
    """Rows that see nothing are exactly 0 with LSE -inf (M5), not merely small."""
    seen = run_case(subject.backend, case, subject.device)
    if wrong := judge(case, seen, subject.device):
        return wrong
    nothing = torch.isinf(case.step(subject.device).oracle().lse)
    if seen.out[nothing].any():
        return f"rows that see no key must be exactly 0 (M5) | case: {case}"
    if seen.lse is not None and not (seen.lse[nothing] == -math.inf).all():
        return f"the LSE of rows that see no key must be -inf (M5) | case: {case}"
    return ""


def _empty(subject: Subject) -> Iterator[Check]:
    block = subject.base.block_size
    batches = {
        "no-requests": "empty",
        "no-tokens": f"q0s{block}_q0s3",
        "only-padding": "only_padding",
        "between-neighbours": "empty_rows",
        "no-keys-first": f"q2s0_q1s{block + 1}_q3s5",
        "no-keys-last": f"q1s{block + 1}_q3s5_q1s0",
        "longer-query-than-sequence": f"q1s9_q5s2_q1s{block}",
    }
    for name, batch in batches.items():
        case = subject.case(batch=batch)
        yield Check(name, lambda case=case: _exact(subject, case), case)  # type: ignore[misc]
    case = subject.case(batch="empty_rows", sinks=True)
    yield Check("between-neighbours-sinks", lambda case=case: _judged(subject, case), case)  # type: ignore[misc]


def _padding(subject: Subject) -> Iterator[Check]:
    for name in ("graph_padding", "only_padding"):
        for poison in ("zero", subject.base.poison):
            case = subject.case(batch=name, poison=poison)
            yield Check(f"{name}-{poison}", lambda case=case: _judged(subject, case), case)  # type: ignore[misc]
    case = subject.case(batch="q9s20_q5_pad7")
    yield Check("prefill", lambda case=case: _judged(subject, case), case)  # type: ignore[misc]
    case = subject.case(batch="q1s20_q9_pad5")
    yield Check("mixed", lambda case=case: _judged(subject, case), case)  # type: ignore[misc]


def _masked_tiles(subject: Subject) -> Iterator[Check]:
    long = 150 if subject.quick else 300
    cases: dict[str, dict[str, object]] = {
        "decode-window": {"batch": f"q1s{long}_q1s2", "sliding_window": 3},
        "prefill-window": {"batch": f"q{long // 2}_q5s{long}", "sliding_window": 2},
        "own-key-only": {
            "batch": f"q40s{long // 2}_q1s90",
            "mask": "bidirectional",
            "window": (0, 0),
        },
        "right-only": {"batch": f"q70s{long // 2}", "mask": "bidirectional", "window": (None, 0)},
        "left-hidden": {"batch": "q70s80", "mask": "bidirectional", "window": (0, None)},
        "chunk-start": {"batch": "q1s129_q3s130_q1s128", "attention_chunk_size": 128},
        "tree-hides-own-tail": {"batch": "q8s64_q7s7", "mask": "query_bias"},
    }
    for name, changes in cases.items():
        case = subject.case(**changes)
        yield Check(name, lambda case=case: _judged(subject, case), case)  # type: ignore[misc]


PROBES = (
    Probe("N2", "empty requests and empty batches", _empty),
    Probe("N3", "rows past the batch are exactly zero", _padding),
    Probe("N4", "tiles that are fully masked", _masked_tiles),
)
