"""The suite `gaps`: its rows are valid, peers take them, and targets are told from results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.backends.flash_attn import FlashAttnBackend
from attnlib.backends.flash_attn import metadata as flash_attn_metadata
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.backends.flashinfer import FlashInferBackend
from attnlib.backends.flashinfer import metadata as flashinfer_metadata
from attnlib.backends.flashinfer.mla import metadata as mla_metadata
from attnlib.backends.flashinfer.probe import find_api
from attnlib.backends.triton import TritonBackend
from attnlib.bench import timer
from attnlib.bench.backends import BenchBackend
from attnlib.bench.case import BenchCase, check_case
from attnlib.bench.gap_cases import GAP_TARGETS, GAPS
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import Peaks
from attnlib.bench.results import Document, Row, Run, write_document
from attnlib.bench.runner import unmeasured
from attnlib.bench.targets import target_lines
from attnlib.cli import main
from attnlib.testing.backend_under_test import load_backend
from attnlib.testing.batch_spec import BatchSpec
from tests.backends import fake_flash_attn
from tests.backends.cpu_backend import H200, on_cpu
from tests.backends.flash_attn.adapter import install_vllm
from tests.backends.flash_mla import fake as fake_flash_mla
from tests.backends.flash_mla.test_backend import _on_cpu as flash_mla_on_cpu
from tests.backends.flashinfer import fake_mla
from tests.backends.flashinfer.test_mla import _on_cpu as flashinfer_mla_on_cpu

PEERS = "benchmarks/gpu/peers.py"
CPU = torch.device("cpu")


def test_every_target_has_its_rows() -> None:
    names = [case.name for case in GAPS]
    assert len(set(names)) == len(names) and GAP_TARGETS.keys() <= set(names)
    others = {target.other for targets in GAP_TARGETS.values() for target in targets} - {""}
    assert others <= set(names) and not others & GAP_TARGETS.keys()
    limits = [target.limit for target in GAP_TARGETS["gap-decode-8x8k-int8-rotated"]]
    assert limits == [0.62, 1.03]  # to bfloat16, and to int8 without a rotation
    without = set(names) - others - GAP_TARGETS.keys()
    assert without == {"gap-decode-200x2k-128heads", "gap-decode-32x3k-d160"}
    for case in GAPS:
        check_case(case)
        assert not TritonBackend.validate_configuration(case.spec, H200), case.name


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BenchBackend]]:
    """The adapters of the peers over fakes that have the recorded signatures."""
    caches = (find_kernels, find_api)
    for cached in caches:
        cached.cache_clear()
    fake_flash_attn.nothing_installed(monkeypatch)
    install_vllm(monkeypatch, fake_flash_attn.Recorder())
    fake_mla.install(monkeypatch, "0.6.12")
    monkeypatch.setattr(mla_metadata, "_WORKSPACE_BYTES", 64)
    fake_flash_mla.install(monkeypatch)
    monkeypatch.setattr(timer, "_ROUND_US", 1.0)
    small: dict[str, Any] = {"workspace_bytes": 64}
    yield [
        BenchBackend(label, backend)
        for label, backend in (
            ("flash_attn", on_cpu(monkeypatch, FlashAttnBackend, flash_attn_metadata, {})),
            ("flashinfer", on_cpu(monkeypatch, FlashInferBackend, flashinfer_metadata, small)),
            ("flashinfer_mla", flashinfer_mla_on_cpu()),
            ("flash_mla", flash_mla_on_cpu()),
        )
    ]
    for cached in caches:
        cached.cache_clear()


def _small(case: BenchCase) -> BenchCase:
    """The same layer over two requests of each kind, with few tokens."""
    pairs = sorted(set(zip(case.batch.query_lens, case.batch.seq_lens, strict=True)))
    lens = [min(query, 9) for query, _ in pairs for _ in range(2)]
    keys = [30 + length for length in lens]
    return replace(case, batch=BatchSpec(tuple(lens), tuple(keys)))


@pytest.mark.slow
def test_peers_take_the_rows(peers: list[BenchBackend]) -> None:
    """Their calls bind and their outputs are right over fakes; XQA is asked for its support."""
    xqa = load_backend(f"{PEERS}:Xqa")
    layers = {replace(case, name="", batch=GAPS[0].batch): case for case in GAPS}
    for case in layers.values():
        peaks = Peaks(10.0, 9.0, 0.1, "none")
        rows = measure_case(_small(case), peers, CPU, peaks, kernels_only=True)
        states = {row.backend: (row.status, row.reason) for row in rows}
        assert {status for status, _ in states.values()} <= {"ok", "unsupported"}, states
        targets = GAP_TARGETS.get(case.name, ())
        if not targets or any(target.other or target.share is not None for target in targets):
            continue
        if case.fp8_queries:
            assert not xqa.validate_configuration(case.spec, H200), case.name
        else:
            assert any(status == "ok" for status, _ in states.values()), (case.name, states)


def _row(name: str, backend: str, us: float | None, run: int = 0, **fields: Any) -> Row:
    (case,) = (one for one in GAPS if one.name == name)
    row = unmeasured(case, backend, "ok" if us else "failed", "" if us else "no memory")
    return replace(row, us=us, how="graph", run=run, **fields)


def test_targets_are_told_from_results() -> None:
    """Against the best peer, the own time on another case, and the share of the peak rates; rows of
    other runs and of `torch` do not count."""
    peer, own, base = "gap-prefill-512-over-60k", "gap-decode-64x300-e4m3", "gap-decode-64x300"
    stream = "streams-decode-32x32k-rate128"
    rows = [
        _row(peer, "triton", 98.0),
        _row(peer, "flash_attn", 100.0),
        _row(peer, "torch", 1.0),
        _row(peer, "flashinfer", 50.0, run=1),
        _row(base, "triton", 10.0),
        _row(own, "triton", 7.6),
        _row(own, "flashinfer", 20.0),
        _row(stream, "triton", 5.0, share=0.7),
    ]
    lines = target_lines(rows, GAP_TARGETS)
    assert lines[0] == "targets of triton:" and lines[-1] == "targets: 2 met, 1 missed, 0 unknown"
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["met", peer],
        ["missed", own],
        ["met", stream],
    ]
    assert f"0.760 of {base}; at most 0.75 x the time of {base}" in lines[2]
    assert "70.0%; at least 70% of the peak rates" in lines[3]
    slower = replace(rows[0], us=98.1)
    assert "missed" in target_lines([slower, *rows[1:]], GAP_TARGETS)[1]
    lower = [replace(row, share=0.69) for row in rows[-1:]]
    assert "missed" in target_lines(lower, GAP_TARGETS)[1]


def test_a_target_without_times_is_unknown() -> None:
    peer, own = "gap-prefill-512-over-60k", "gap-decode-64x300-e4m3"
    rows = [_row(peer, "triton", 98.0), _row(own, "triton", None), _row(own, "flashinfer", 20.0)]
    rows += [_row("gap-decode-64x300", "triton", 10.0)]
    lines = target_lines(rows, GAP_TARGETS)
    assert "no other backend has no time" not in "".join(lines)
    assert lines[-1] == "targets: 0 met, 0 missed, 2 unknown"
    assert "no time of the best other backend" in lines[1] and "failed: no memory" in lines[2]
    rows[1] = replace(_row(own, "triton", 5.0), how="eager")  # not the timing of the other row
    assert "unknown" in target_lines(rows, GAP_TARGETS)[2]
    assert not target_lines([_row("gap-decode-64x300", "triton", 10.0)], GAP_TARGETS)


def test_the_command_prints_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the list, and at the end of a run or of a file of results."""
    assert main(["bench", "--list", "gap-prefill-512-*", "--device", "cpu"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition(" · at most ")[2] for line in listed] == [
        "0.98 x the time of the best other backend",
        "",
        "1.03 x the time of gap-prefill-512-over-30k",
    ]
    name, file = "gap-prefill-512-over-60k", tmp_path / "gaps.json"
    rows = (_row(name, "triton", 80.0), _row(name, "flash_attn", 100.0))
    peaks = {"read_gbps": 9.0, "copy_gbps": 9.0, "matmul_tflops": 0.1, "matmul": "none"}
    write_document(Document((Run({}, peaks),), rows), file)
    assert main(["bench", "--from-json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "met      gap-prefill-512-over-60k" in shown and "0.800 of flash_attn" in shown
    assert "targets: 1 met, 0 missed, 0 unknown" in shown
