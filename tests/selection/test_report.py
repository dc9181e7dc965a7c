"""The report as data, as a table, as a log line, and as an error."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.capabilities import Reason
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


def test_the_choice_is_the_first_line_and_one_row() -> None:
    assert REPORT.choice().splitlines() == [
        "attnlib chose fast on cpu [requested by argument]",
        "  fast  chosen       prefill: one kernel",
        "                     decode:  another kernel with a long condition with a long condition",
        "                              with a long condition with a long condition with a long",
        "                              condition",
        "                     measured fastest",
    ]


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


def test_rejections_are_data() -> None:
    """Every reason with its backend, status and spec field."""
    spec = attnlib.AttentionSpec(
        num_heads=4, head_size=64, dtype=torch.float32, kv_cache_layout="HND", has_sink=True
    )
    limited = type("Limited", (TorchBackend,), {
        "get_name": staticmethod(lambda: "limited"),
        "capabilities": replace(TorchBackend.capabilities, sink=False, kv_cache_layouts=("NHD",)),
        "supports_combination": classmethod(lambda cls, spec, device: ["sinks with HND"]),
    })  # fmt: skip
    rejections = [r for r in attnlib.explain(spec, "cpu", limited).rejections()
                  if r.backend == "limited"]  # fmt: skip
    assert [(r.status, r.field) for r in rejections] == [
        ("unsupported", "kv_cache_layout"),
        ("unsupported", "has_sink"),
        ("unsupported", None),
    ]
    assert str(rejections[1]) == "limited: attention sinks: not supported"
    with pytest.raises(UnsupportedConfigError) as caught:
        attnlib.get_attn_backend(spec, limited, "cpu")
    assert list(caught.value.rejections) == rejections
    assert pickle.loads(pickle.dumps(caught.value)).rejections == tuple(rejections)
    with attnlib.use_backend("-torch"), pytest.raises(UnsupportedConfigError) as caught:
        attnlib.get_attn_backend(spec, None, "cpu")
    assert ("torch", "excluded") in {(r.backend, r.status) for r in caught.value.rejections}


def test_a_reason_behind_a_label_keeps_its_field() -> None:
    reason = Reason.prefixed("FA3", Reason("head_size=72 not supported", "head_size"))
    assert reason == "FA3: head_size=72 not supported" and reason.field == "head_size"
    assert pickle.loads(pickle.dumps(reason)).field == "head_size"
    assert Reason.prefixed("FA3", "in words").field is None
