"""Workloads of FlashInfer-Bench as input of `attnlib bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attnlib.bench import command, timer
from attnlib.bench.backends import find_backends
from attnlib.bench.inputs import make_inputs
from attnlib.bench.peaks import Peaks
from attnlib.bench.results import read_document
from attnlib.bench.runner import make_runner
from attnlib.bench.trace_files import read_definitions, read_workloads
from attnlib.bench.trace_set import Definition, Workload
from attnlib.bench.workload_case import workload_cases
from attnlib.cli import main
from attnlib.errors import ContractError
from tests.bench.trace_sets import (
    DECODE,
    LENGTHS,
    PAGED,
    RAGGED,
    REFERENCES,
    SCALES,
    tensors,
    workload,
    write_trace_set,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "_ROUND_US", 100.0)
    monkeypatch.setattr(
        command, "measure_peaks", lambda device: Peaks(10.0, 9.0, 0.1, "no product")
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_trace_set(tmp_path / "set")


def test_the_cases_of_a_trace_set(root: Path) -> None:
    cases, left_out = workload_cases(root)
    found = {case.name: case for case in cases}
    assert list(found) == [f"{DECODE}/00000000", f"{PAGED}/00000001", f"{RAGGED}/00000002"]
    for case, name in zip(cases, (DECODE, PAGED, RAGGED), strict=True):
        assert (list(case.batch.query_lens), list(case.batch.seq_lens)) == LENGTHS[name]
        assert (case.num_heads, case.num_kv_heads, case.head_size) == (4, 2, 16)
        assert case.scale == SCALES[name] and case.spec.dtype == torch.float32
    assert [case.block_size for case in cases] == [1, 4, 16]
    assert len(left_out) == 1 and left_out[0].startswith("gemm_n64: its inputs or outputs")


@pytest.mark.parametrize("name", [DECODE, PAGED, RAGGED])
def test_the_tensors_are_those_of_the_workload(root: Path, name: str) -> None:
    """Pages, stored keys and values, and the scale: the output is that of the reference."""
    (case,), _ = workload_cases(root, [f"{name}/*"])
    inputs = make_inputs(case, CPU)
    made = tensors(name)
    assert torch.equal(inputs.query, made["q"])
    if name != RAGGED:
        assert torch.equal(inputs.caches[0].key_cache, made["k_cache"])
        row = inputs.common.block_table_tensor[0]
        assert row[row >= 0].tolist() == made["kv_indices"][: made["kv_indptr"][1]].tolist()
    scope: dict[str, Any] = {}
    exec(REFERENCES[name], scope)
    given = read_definitions(root)[name].inputs
    expected, _ = scope["run"](*(made.get(x, SCALES[name]) for x in given))
    (torch_backend,) = find_backends(["torch"], CPU)
    runner = make_runner(case, torch_backend, inputs)
    torch.testing.assert_close(runner.output, expected, rtol=1e-4, atol=1e-4)


def test_a_run_checks_and_measures_them(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bench.json"
    arguments = ["bench", "--workloads", str(root), "--device", "cpu", "--json", str(target)]
    assert main([*arguments, "--backends", "torch"]) == 0
    shown = capsys.readouterr()
    assert "left out: gemm_n64" in shown.err and "3 rows · 3 ok" in shown.out
    rows = read_document(target).rows
    assert [row.status for row in rows] == ["ok"] * 3 and all(row.checked for row in rows)
    assert rows[0].settings["definition"] == DECODE
    assert rows[0].settings["workload"] == "00000000-full"
    assert main([*arguments, "gqa_ragged*/*", "--list"]) == 0
    assert capsys.readouterr().out.split()[0] == f"{RAGGED}/00000002"


def test_one_file_and_random_tensors(root: Path) -> None:
    """Only the offsets must be stored; equal beginnings of ids give the long names."""
    file = root / "workloads" / "gqa" / f"{DECODE}.jsonl"
    line = workload(DECODE, root, "00000000-random", stored=("kv_indptr", "kv_indices"))
    file.write_text(file.read_text() + line + "\n")
    cases, left_out = workload_cases(file)
    assert [case.name for case in cases] == [
        f"{DECODE}/00000000", f"{DECODE}/00000000-random"
    ] and not left_out  # fmt: skip
    first, second = (make_inputs(case, CPU) for case in cases)
    assert not torch.equal(first.query, second.query)
    assert torch.equal(first.common.block_table_tensor, second.common.block_table_tensor)


def test_pages_of_a_workload_are_fixed(root: Path) -> None:
    with pytest.raises(ContractError, match="has pages of 1 tokens: leave out --block-size"):
        workload_cases(root, [f"{DECODE}/*"], block_size=32)
    (case,), _ = workload_cases(root, [f"{RAGGED}/*"], block_size=32)
    assert case.block_size == 32
    assert main(["bench", "--workloads", str(root), "--suite", "cpu"]) == 2


def _changed(root: Path, change: Callable[[dict[str, Any]], None]) -> list[Workload | str]:
    file = root / "workloads" / "gqa" / f"{DECODE}.jsonl"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    return list(read_workloads(file))


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "random offsets": (
        lambda x: x["workload"]["inputs"].update(kv_indptr={"type": "random"}),
        "does not fix kv_indptr",
    ),
    "random pages": (
        lambda x: x["workload"]["inputs"].update(kv_indices={"type": "random"}),
        "does not fix kv_indices",
    ),
    "a missing file": (
        lambda x: x["workload"]["inputs"]["kv_indptr"].update(path="blob/none.safetensors"),
        "has no tensor 'kv_indptr'",
    ),
    "another shape": (
        lambda x: x["workload"]["axes"].update(len_indptr=7),
        r"torch.int32 \(4,\); its definition says int32 \(7,\)",
    ),
    "few pages": (lambda x: x["workload"]["axes"].update(num_pages=5), "below num_pages=5"),
    "another kernel": (lambda x: x.update(definition="unknown"), "does not define it"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_workload_that_cannot_be_measured_is_left_out(root: Path, name: str) -> None:
    change, message = BROKEN[name]
    _changed(root, change)
    with pytest.raises(ContractError, match=message):
        workload_cases(root / "workloads" / "gqa" / f"{DECODE}.jsonl")
    cases, left_out = workload_cases(root)
    assert len(cases) == 2 and len(left_out) == 2


def test_offsets_that_fall(root: Path) -> None:
    found = _changed(root, lambda x: None)[0]
    assert isinstance(found, Workload)
    save_file(
        {**tensors(DECODE), "kv_indptr": torch.tensor([0, 9, 3, 40], dtype=torch.int32)},
        root / found.inputs["kv_indptr"]["path"],
    )
    with pytest.raises(ContractError, match="kv_indptr does not rise from 0"):
        found.lengths()


def test_files_that_are_no_trace_set(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ContractError, match=r"has no definitions/\*.json"):
        workload_cases(tmp_path / "empty")
    with pytest.raises(ContractError, match="does not exist"):
        workload_cases(tmp_path / "none.jsonl")
    stray = tmp_path / "stray.jsonl"
    stray.write_text("{}\n")
    with pytest.raises(ContractError, match="no folder above"):
        workload_cases(stray)
    (root / "workloads" / "gemm.jsonl").write_text("{}\n")
    with pytest.raises(ContractError, match="line 1 is not a FlashInfer-Bench workload"):
        workload_cases(root)
    (root / "definitions" / "gemm.json").write_text("[]")
    with pytest.raises(ContractError, match="is not a FlashInfer-Bench definition"):
        read_definitions(root)


def test_which_definitions_are_attention(root: Path) -> None:
    known = read_definitions(root)[DECODE]
    assert known.is_causal and known.is_paged and not known.unsupported_reason
    sized = Definition("x", {}, known.inputs, known.outputs)
    assert "num_qo_heads, num_kv_heads, head_dim, page_size must be" in sized.unsupported_reason
    masked = {**known.inputs, "mask": (("total_q",), "bool")}
    assert "(mask)" in Definition("x", known.axes, masked, ("output",)).unsupported_reason
    queries = {**known.inputs, "qo_indptr": (("len_indptr",), "int32")}
    assert not Definition("gqa_paged_prefill", known.axes, queries, ("output",)).is_causal
