"""What `explain` says of the kernels that the `triton` backend will use on a Hopper chip."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from attnlib import AttentionSpec, explain
from attnlib.backends.base import AttentionBackend
from attnlib.backends.triton import TritonBackend
from attnlib.device import resolve_device
from attnlib.ops.triton.hopper.support import prefers_hopper_decode
from attnlib.selection.report import CandidateReport, SelectionReport, SelectionStatus


def _notes(
    device: str = "sm_90", backend: type[AttentionBackend] = TritonBackend, **features: Any
) -> list[str]:
    layer = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": torch.bfloat16,
        "block_size": 16,
        **features,
    }
    return backend.explain_lines(AttentionSpec(**layer), resolve_device(device))


LENGTHS = "from 256 keys on, 2048 with more than 8 (request, KV head) pairs for each multiprocessor"


def test_what_gluon_serves_is_said_in_one_line_with_the_lengths() -> None:
    assert _notes() == [
        f"Gluon kernels for SM90: prefill, decode of up to 8 query tokens ({LENGTHS})"
    ]
    assert _notes(num_heads=128) == [
        f"Gluon kernels for SM90: prefill, decode of up to 4 query tokens ({LENGTHS})"
    ]


def test_what_is_said_of_lengths_is_what_is_done() -> None:
    """The words hold against the choice itself, on both sides of both lengths."""
    few, many, most = (int(word) for word in re.findall(r"\d+", LENGTHS))
    for pairs, edge in ((most * 132, few), (most * 132 + 1, many)):
        assert [prefers_hopper_decode(keys, pairs, 1, 132) for keys in (edge - 1, edge)] == [
            False,
            True,
        ]


def test_a_window_that_never_shows_enough_keys_leaves_decode_to_plain_triton() -> None:
    served, left = _notes(sliding_window=128)
    assert served == "Gluon kernels for SM90: prefill"
    assert (
        left
        == "decode by plain Triton: at most 135 keys are visible; the Hopper decode is taken from 256 on"
    )
    assert _notes(attention_chunk_size=128)[1].startswith(
        "decode by plain Triton: at most 135 keys"
    )
    assert (
        _notes(sliding_window=248)[1].startswith("decode by plain Triton: at most 255 keys")
        and LENGTHS in _notes(sliding_window=249)[0]
    )
    assert LENGTHS in _notes(window=(64, None), mask_kind="bidirectional")[0], (
        "no bound on later keys"
    )


def test_what_plain_triton_serves_is_said_with_the_reason() -> None:
    """A fallback is never silent: the phase, the value, the limit."""
    prefill, decode = _notes(block_size=24)
    assert (
        prefill
        == "prefill by plain Triton: block_size 24; the Hopper prefill takes 16, 32, 64, 128, 256"
    )
    assert decode.startswith("decode by plain Triton: block_size 24")
    assert "torch.float8_e4m3fn" in _notes(kv_cache_dtype=torch.float8_e4m3fn)[0]
    served, left = _notes(num_heads=96, num_kv_heads=1)
    assert served == "Gluon kernels for SM90: prefill" and "96 query heads for each KV head" in left


@pytest.mark.parametrize("device", ["sm_80", "sm_120", "cpu"])
def test_other_chips_have_nothing_to_remark(device: str) -> None:
    assert _notes(device) == []


def test_a_setting_that_keeps_to_plain_kernels_is_said() -> None:
    class Portable(TritonBackend):
        config = {"kernels": "portable"}

    assert _notes(backend=Portable) == ["plain Triton kernels (kernels=portable)"]


def test_explain_shows_notes_beside_the_choice() -> None:
    spec = AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16
    )
    (triton,) = (c for c in explain(spec, device="sm_90").candidates if c.name == "triton")
    assert triton.status is not SelectionStatus.ACCEPTED or triton.reasons[0].startswith(
        "Gluon kernels for SM90"
    )


def test_a_second_reason_stands_under_the_first() -> None:
    report = SelectionReport(
        "a", "auto", "here", (CandidateReport("a", SelectionStatus.ACCEPTED, ("one", "two")),)
    )
    first, second = str(report).splitlines()[1:]
    assert first.index("one") == second.index("two")
