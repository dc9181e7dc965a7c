"""The list of FlashInfer kernels that the exam needs, and how they are trimmed and packed."""

from __future__ import annotations

import dataclasses
import functools
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.backends.flashinfer import FlashInferBackend
from attnlib.backends.flashinfer import metadata as flashinfer_metadata
from attnlib.backends.flashinfer.probe import find_api
from attnlib.bench.suites import SUITES
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.testing import run_conformance
from tests.backends import fake_flashinfer
from tests.backends.cpu_backend import on_cpu
from tests.benchmarks.scripts import load

script = load("flashinfer_kernels")

PAGED_FA2 = """#include <flashinfer/attention/prefill.cuh>
#include "batch_prefill_config.inc"

namespace flashinfer {

constexpr auto use_custom_mask = MaskMode::kCustom == MaskMode::kCustom;


template cudaError_t BatchPrefillWithPagedKVCacheDispatched<
    /*CTA_TILE_Q=*/16, 64, 64, PosEncodingMode::kNone, false, MaskMode::kCustom,
    DefaultAttention<use_custom_mask, false, false, false>, PagedParams>(PagedParams params, nv_bfloat16* tmp_v, float* tmp_s, cudaStream_t s);

template cudaError_t BatchPrefillWithPagedKVCacheDispatched<
    /*CTA_TILE_Q=*/64, 64, 64, PosEncodingMode::kNone, false, MaskMode::kCustom,
    DefaultAttention<use_custom_mask, false, false, false>, PagedParams>(PagedParams params, nv_bfloat16* tmp_v, float* tmp_s, cudaStream_t s);

};  // namespace flashinfer
"""


@dataclasses.dataclass
class Spec:
    sources: list[Path]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """FlashInfer by its stand-in, and the kernels that plans have asked for so far."""
    kernels: set[Any] = set()
    module = fake_flashinfer.install(monkeypatch, fake_flashinfer.Recorder())
    for wrapper in (
        module.BatchDecodeWithPagedKVCacheWrapper,
        module.BatchPrefillWithPagedKVCacheWrapper,
    ):

        def watched(plan: Any) -> Any:
            @functools.wraps(plan)
            def watching(self: Any, **arguments: Any) -> Any:
                types = [
                    str(arguments[name]).removeprefix("torch.")
                    for name in ("q_data_type", "kv_data_type")
                ]
                size = arguments.get("head_dim") or arguments["head_dim_qk"]
                kernels.add(
                    script.Kernel(
                        self.backend,
                        *types,
                        size,
                        arguments["window_left"] != -1,
                        arguments["logits_soft_cap"] > 0,
                    )
                )
                return plan(self, **arguments)

            return watching

        monkeypatch.setattr(wrapper, "plan", watched(wrapper.plan))
    find_api.cache_clear()
    yield kernels
    find_api.cache_clear()


def test_the_exam_plans_for_no_other_kernels(
    monkeypatch: pytest.MonkeyPatch, asked: set[Any]
) -> None:
    """J3: what is compiled ahead is what the exam asks for. A new case with another kernel fails here, not on a GPU ten minutes in."""
    backend = on_cpu(monkeypatch, FlashInferBackend, flashinfer_metadata, {"workspace_bytes": 64})
    report = run_conformance(backend, device="cpu", label="flashinfer")
    assert report.passed, str(report)
    assert len(asked) > 8 and asked <= set(script.SETS["exam"]), asked - set(script.SETS["exam"])


def test_the_bench_plans_for_no_other_kernels(
    monkeypatch: pytest.MonkeyPatch, asked: set[Any]
) -> None:
    """J3: every row of `attnlib bench` that FlashInfer can serve finds its kernel where nothing may be compiled."""
    backend = on_cpu(monkeypatch, FlashInferBackend, flashinfer_metadata, {"workspace_bytes": 64})
    for case in SUITES["anchors"]:
        batch, pages = case.batch, -(-case.batch.max_seq_len // case.block_size)
        table = torch.zeros(batch.num_reqs, pages, dtype=torch.int32)
        common = CommonAttentionMetadata.from_lengths(
            list(batch.query_lens), list(batch.seq_lens), table, case.block_size, "cpu"
        )
        backend.make_builder(case.spec, "cpu").build(0, common)
    compiled = {kernel for kernels in script.SETS.values() for kernel in kernels}
    assert {kernel.head_size for kernel in asked} == {64, 128, 256}
    assert asked <= compiled, asked - compiled


def test_what_attnlib_never_calls_is_left_out(tmp_path: Path) -> None:
    """Paged kernels without a mask and with a causal one stay; the entries of the others remain, without a kernel."""
    names = [
        f"batch_prefill_{kind}_kernel_mask_{mask}.cu"
        for kind in ("paged", "ragged")
        for mask in range(4)
    ] + ["batch_prefill.cu"]
    for name in names:
        (tmp_path / name).write_text(
            PAGED_FA2 if "paged" in name else PAGED_FA2.replace("Paged", "Ragged")
        )
    sources = script.lean(Spec([tmp_path / name for name in names])).sources
    assert {path.name for path in sources} == {
        "batch_prefill_paged_kernel_mask_0.cu",
        "batch_prefill_paged_kernel_mask_1.cu",
        "batch_prefill.cu",
        "stub.cu",
    }
    stub = (tmp_path / "stub.cu").read_text()
    assert "prefill.cuh" not in stub and stub.count("return cudaErrorNotSupported") == 2, (
        "one body for each of the two names"
    )
    assert stub.count("template cudaError_t BatchPrefillWithPagedKVCacheDispatched") == 2 * 2
    assert stub.count("template cudaError_t BatchPrefillWithRaggedKVCacheDispatched") == 4 * 2
    assert stub.count("DefaultAttention<true,") == 2 * 2, "the custom mask, paged and ragged"
    assert "use_custom_mask" not in stub


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match="--full"):
        script.stub_of([("namespace flashinfer {}", False)])


def test_packs_are_small_and_come_back(tmp_path: Path) -> None:
    """Every part stands alone; what is already there is left alone."""
    folder, out, back = tmp_path / "aot", tmp_path / "out", tmp_path / "back"
    for number in range(5):
        path = folder / f"module_{number}" / f"module_{number}.so"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes((number * 7 + i * i) % 251 for i in range(9000)))
    size = 16 * 1024
    parts = script.pack(folder, out, part_bytes=size)
    assert len(parts) > 1 and all(part.stat().st_size <= size for part in parts)
    assert all(tarfile.is_tarfile(part) for part in parts)
    (back / "module_3").mkdir(parents=True)
    (back / "module_3" / "module_3.so").write_bytes(b"mine")
    assert sorted(script.unpack(out, back)) == [
        "module_0.so",
        "module_1.so",
        "module_2.so",
        "module_4.so",
    ]
    assert (back / "module_3" / "module_3.so").read_bytes() == b"mine"
    assert (back / "module_2" / "module_2.so").read_bytes() == (
        folder / "module_2" / "module_2.so"
    ).read_bytes()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A module description, and ninja replaced by a list of what it says."""

    @dataclasses.dataclass
    class Module:
        name: str = "module"
        is_aot: bool = False
        sources: tuple[Path, ...] = ()
        aot_path: Path = tmp_path / "aot" / "module" / "module.so"
        jit_library_path: Path = tmp_path / "jit" / "module.so"

    module = Module()
    module.jit_library_path.parent.mkdir()
    module.jit_library_path.write_bytes(b"library")
    monkeypatch.setattr(script, "spec_of", lambda kernel: module)
    return module


@pytest.mark.parametrize(
    ("says", "there"),
    [([""], True), (["error: no", ""], True), (["error: no", "error: still"], False)],
)
def test_a_module_that_does_not_compile_lean_is_compiled_whole(
    monkeypatch: pytest.MonkeyPatch,
    built: Any,
    says: list[str],
    there: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """J4: and what the compiler said is shown."""
    builder, answers = script.Builder(deadline=float("inf"), jobs=1, full=False), list(says)
    monkeypatch.setattr(builder, "_ninja", lambda spec: answers.pop(0))
    monkeypatch.setattr(script, "unresolved", lambda library: "")
    assert builder.build(script.SETS["exam"][0]) is there and not answers
    assert built.aot_path.exists() is there
    said = capsys.readouterr().out
    assert all(word in said for word in says)


def test_a_lean_module_that_does_not_load_is_compiled_whole(
    monkeypatch: pytest.MonkeyPatch, built: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library with a missing symbol loads lazily and would fail at its first call: the loader is asked for everything now."""
    builder, compiled = script.Builder(deadline=float("inf"), jobs=1, full=False), []
    monkeypatch.setattr(builder, "_ninja", lambda spec: compiled.append(spec) or "")
    assert builder.build(script.SETS["exam"][0]) and len(compiled) == 2, (
        "these bytes are no library"
    )
    assert "compiling it whole" in capsys.readouterr().out


def test_nothing_starts_when_time_is_up(built: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert not script.Builder(deadline=0.0, jobs=1, full=False).build(script.SETS["exam"][0])
    assert "no time left" in capsys.readouterr().out
