"""The lists of FlashInfer kernels, and how modules are trimmed, compiled and packed."""

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
    DefaultAttention<use_custom_mask, false, false, false>, PagedParams>(
    PagedParams params, nv_bfloat16* tmp_v, float* tmp_s, cudaStream_t s);

template cudaError_t BatchPrefillWithPagedKVCacheDispatched<
    /*CTA_TILE_Q=*/64, 64, 64, PosEncodingMode::kNone, false, MaskMode::kCustom,
    DefaultAttention<use_custom_mask, false, false, false>, PagedParams>(
    PagedParams params, nv_bfloat16* tmp_v, float* tmp_s, cudaStream_t s);

};  // namespace flashinfer
"""


@dataclasses.dataclass
class Spec:
    sources: list[Path]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """A fake FlashInfer, and the kernels that were planned so far."""
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


@pytest.mark.slow
def test_the_conformance_suite_plans_no_other_kernels(
    monkeypatch: pytest.MonkeyPatch, planned: set[Any]
) -> None:
    """J3: the adapter conforms, over a fake of the package that computes with torch. All kernels of
    the suite are in the list; a new case fails here and not on a GPU."""
    backend = on_cpu(monkeypatch, FlashInferBackend, flashinfer_metadata, {"workspace_bytes": 64})
    report = run_conformance(backend, device="cpu", label="flashinfer")
    assert report.passed, str(report)
    assert len(planned) > 8 and planned <= set(script.SETS["verify"]), planned - set(
        script.SETS["verify"]
    )


def test_the_benchmark_plans_no_other_kernels(
    monkeypatch: pytest.MonkeyPatch, planned: set[Any]
) -> None:
    """J3: all kernels of the cases of `anchors` and `gaps` are in the lists."""
    backend = on_cpu(monkeypatch, FlashInferBackend, flashinfer_metadata, {"workspace_bytes": 64})
    for case in (*SUITES["anchors"], *SUITES["gaps"]):
        if backend.validate_configuration(case.spec, "cpu"):
            continue
        batch, pages = case.batch, -(-case.batch.max_seq_len // case.block_size)
        table = torch.zeros(batch.num_reqs, pages, dtype=torch.int32)
        common = CommonAttentionMetadata.from_lengths(
            list(batch.query_lens), list(batch.seq_lens), table, case.block_size, "cpu"
        )
        backend.make_builder(case.spec, "cpu").build(0, common)
    compiled = {kernel for kernels in script.SETS.values() for kernel in kernels}
    assert {kernel.head_size for kernel in planned} == {64, 128, 256}
    assert planned <= compiled, planned - compiled


def test_kernels_that_attnlib_never_calls_are_left_out(tmp_path: Path) -> None:
    """Paged kernels with no mask or a causal mask stay; the others keep their entry points only."""
    names = [
        f"batch_prefill_{kind}_kernel_mask_{mask}.cu"
        for kind in ("paged", "ragged")
        for mask in range(4)
    ] + ["batch_prefill.cu"]
    for name in names:
        (tmp_path / name).write_text(
            PAGED_FA2 if "paged" in name else PAGED_FA2.replace("Paged", "Ragged")
        )
    sources = script.without_unused(Spec([tmp_path / name for name in names])).sources
    assert {path.name for path in sources} == {
        "batch_prefill_paged_kernel_mask_0.cu",
        "batch_prefill_paged_kernel_mask_1.cu",
        "batch_prefill.cu",
        "stub.cu",
    }
    stub = (tmp_path / "stub.cu").read_text()
    assert "prefill.cuh" not in stub and stub.count("return cudaErrorNotSupported") == 2, (
        "one body per name"
    )
    assert stub.count("template cudaError_t BatchPrefillWithPagedKVCacheDispatched") == 2 * 2
    assert stub.count("template cudaError_t BatchPrefillWithRaggedKVCacheDispatched") == 4 * 2
    assert stub.count("DefaultAttention<true,") == 2 * 2, "custom masks, paged and ragged"
    assert "use_custom_mask" not in stub


def test_stubs_have_the_template_parameters_of_their_entry_points() -> None:
    """FlashInfer 0.7 has one more for paged keys than 0.6, and none more for others."""
    tile = "/*CTA_TILE_Q=*/"
    paged = PAGED_FA2.replace(tile, f"/*SAME_KV_STRIDES=*/true, {tile}")
    assert paged != PAGED_FA2
    stub = script.stub_of([(paged, False), (PAGED_FA2.replace("Paged", "Ragged"), False)])
    bodies = [part.split(">")[0] for part in stub.split("\ntemplate <")[1:]]
    assert len(bodies) == 2 and all("uint32_t CTA_TILE_Q" in body for body in bodies)
    assert [body.startswith("bool SAME_KV_STRIDES") for body in bodies] == [True, False]
    assert "@" not in stub


def test_an_unknown_source_is_an_error() -> None:
    with pytest.raises(ValueError, match="--full"):
        script.stub_of([("namespace flashinfer {}", False)])


def test_packs_are_small_and_can_be_extracted(tmp_path: Path) -> None:
    """Packs are independent, and existing files are not overwritten."""
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
    """A module description; tests replace ninja."""

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
    ("outputs", "installed"),
    [([""], True), (["error: no", ""], True), (["error: no", "error: still"], False)],
)
def test_a_module_that_does_not_compile_trimmed_is_compiled_completely(
    monkeypatch: pytest.MonkeyPatch,
    built: Any,
    outputs: list[str],
    installed: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """J4: the output of the compiler is printed."""
    builder, answers = script.Builder(deadline=float("inf"), jobs=1, full=False), list(outputs)
    monkeypatch.setattr(builder, "_ninja", lambda spec: answers.pop(0))
    monkeypatch.setattr(script, "unresolved", lambda library: "")
    assert builder.build(script.SETS["verify"][0]) is installed and not answers
    assert built.aot_path.exists() is installed
    printed = capsys.readouterr().out
    assert all(word in printed for word in outputs)


def test_a_trimmed_module_that_does_not_load_is_compiled_completely(
    monkeypatch: pytest.MonkeyPatch, built: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library with an undefined symbol would fail at its first call."""
    builder, compiled = script.Builder(deadline=float("inf"), jobs=1, full=False), []
    monkeypatch.setattr(builder, "_ninja", lambda spec: compiled.append(spec) or "")
    assert builder.build(script.SETS["verify"][0]) and len(compiled) == 2, (
        "the bytes are not a library"
    )
    assert "compiling all files" in capsys.readouterr().out


def test_nothing_starts_after_the_deadline(built: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert not script.Builder(deadline=0.0, jobs=1, full=False).build(script.SETS["verify"][0])
    assert "no time left" in capsys.readouterr().out
