"""The report as data, as a table, as a log line, and as an error."""

from __future__ import annotations

import json

import torch

import attnlib
from attnlib.errors import UnsupportedConfigError
from attnlib.selection.report import (
    CandidateReport,
    SelectionReport,
    SelectionStatus,
    selection_error,
)

SPEC = attnlib.AttentionSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32)


def test_the_report_is_data_and_a_table() -> None:
    report = attnlib.explain(SPEC, device="cpu")
    assert json.loads(json.dumps(report.to_dict()))["chosen"] == "torch"
    lines = str(report).splitlines()
    assert lines[0] == "attnlib chose torch on cpu [auto; ATTNLIB_BACKEND overrides]"
    assert any(line.split() == ["torch", "chosen"] for line in lines[1:])


ACCEPTED, UNSUPPORTED = SelectionStatus.ACCEPTED, SelectionStatus.UNSUPPORTED
REPORT = SelectionReport(
    "fast",
    "argument",
    "cpu",
    (
        CandidateReport(
            "fast",
            ACCEPTED,
            ("measured fastest",),
            ("prefill: one kernel", "decode:  another kernel " + "with a long condition " * 5),
        ),
        CandidateReport("limited", UNSUPPORTED, ("no sinks", "no ALiBi")),
        CandidateReport("slow", ACCEPTED, ("lower priority",), ("prefill: a third kernel",)),
    ),
)


def test_the_table_is_aligned_and_wrapped() -> None:
    """At most 90 columns; only the chosen backend shows its kernels."""
    assert str(REPORT).splitlines() == [
        "attnlib chose fast on cpu [requested by argument]",
        "  fast     chosen       prefill: one kernel",
        "                        decode:  another kernel with a long condition with a long",
        "                                 condition with a long condition with a long condition",
        "                                 with a long condition",
        "                        measured fastest",
        "  limited  unsupported  no sinks",
        "                        no ALiBi",
        "  slow     accepted     lower priority",
    ]
    assert max(map(len, str(REPORT).splitlines())) <= 90


def test_the_log_line_names_the_reasons_against_the_others() -> None:
    assert REPORT.one_line() == (
        "chose fast on cpu [limited: unsupported (no sinks, no ALiBi); "
        "slow: accepted (lower priority)]"
    )
    assert REPORT.accepted == ("fast", "slow")
    assert REPORT.reasons() == {"fast": [], "limited": ["no sinks", "no ALiBi"], "slow": []}


def test_the_error_names_the_reasons_and_the_alternatives() -> None:
    error = selection_error(SPEC, REPORT, ("limited",), lambda name: "")
    assert isinstance(error, UnsupportedConfigError) and error.reasons == ("no sinks", "no ALiBi")
    assert str(error) == (
        "backend 'limited' (from argument) is unsupported on cpu: no sinks; no ALiBi. "
        "Backends that support this spec here: fast, slow."
    )
