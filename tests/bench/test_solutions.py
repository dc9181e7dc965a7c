"""Solutions for FlashInfer-Bench: valid files whose code computes the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.bench.solutions import paged_attention, solution, write_solutions
from attnlib.bench.trace_files import read_definitions
from attnlib.bench.trace_set import Definition
from attnlib.cli import main
from attnlib.errors import ContractError
from tests.bench.trace_sets import (
    DECODE,
    PAGED,
    RAGGED,
    REFERENCES,
    SCALES,
    tensors,
    write_trace_set,
)

KERNELS = (DECODE, PAGED, RAGGED)


def _run(source: str) -> Any:
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["run"]


def _arguments(name: str, definition: Definition) -> list[Any]:
    scale = SCALES[name]
    return [tensors(name).get(given, scale) for given in definition.inputs]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_the_code_computes_the_reference(
    tmp_path: Path, name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and base-2 LSE, from the arguments in the order of the definition."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ATTNLIB_BACKEND", backend)
    definition = read_definitions(write_trace_set(tmp_path))[name]
    made = solution(definition)
    run = _run(made["sources"][0]["content"])
    expected = _run(REFERENCES[name])(*_arguments(name, definition))
    found = run(*_arguments(name, definition))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_command_writes_one_file_per_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, folder = write_trace_set(tmp_path / "set"), tmp_path / "solutions"
    assert main(["bench", "--workloads", str(root), "--solutions", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert {path.stem for path in folder.iterdir()} == {f"attnlib_{name}" for name in KERNELS}
    assert "left out: gemm_n64: its inputs or outputs are not those of GQA attention" in shown
    assert "left out: mla_paged_decode_h16" in shown
    made = json.loads((folder / f"attnlib_{PAGED}.json").read_text())
    assert made["spec"]["entry_point"] == "main.py::run" and made["definition"] == PAGED
    assert main(["bench", "--solutions", str(folder)]) == 2
    assert "--solutions needs --workloads" in capsys.readouterr().err


def test_no_solution_for_other_kernels(tmp_path: Path) -> None:
    gemm = read_definitions(write_trace_set(tmp_path))["gemm_n64"]
    with pytest.raises(ContractError, match="gemm_n64 has no solution by attnlib"):
        solution(gemm)


def test_only_the_output_is_returned_where_it_is_the_only_one(tmp_path: Path) -> None:
    definition = read_definitions(write_trace_set(tmp_path))[DECODE]
    alone = Definition(definition.name, definition.axes, definition.inputs, ("output",))
    found = _run(solution(alone)["sources"][0]["content"])(*_arguments(DECODE, definition))
    assert isinstance(found, torch.Tensor) and found.shape == (3, 4, 16)


def test_requests_without_keys() -> None:
    made = tensors(DECODE)
    empty = torch.tensor([0, 9, 9, 39], dtype=torch.int32)
    output, lse = paged_attention(
        made["q"], made["k_cache"], made["v_cache"], empty, made["kv_indices"][:39]
    )
    assert not output[1].any() and torch.isneginf(lse[1]).all() and torch.isfinite(lse[0]).all()


@pytest.mark.parametrize("name", KERNELS)
def test_flashinfer_bench_accepts_builds_and_runs_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own schema, its builder, and its comparison with the reference."""
    pytest.importorskip("flashinfer_bench")
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.data import TraceSet

    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    root = write_trace_set(tmp_path / "set")
    write_solutions(root, root / "solutions")
    loaded = TraceSet.from_path(str(root))
    definition, (made,) = loaded.definitions[name], loaded.solutions[name]
    workload = loaded.workloads[name][0].workload
    stored = load_safetensors(definition, workload, root)
    inputs = gen_inputs(definition, workload, "cpu", stored)
    registry = BuilderRegistry.get_instance()
    expected = registry.build_reference(definition)(*inputs)
    found = registry.build(definition, made)(*inputs)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-4, atol=1e-4)
