"""M15: certificates of batch invariance, and backends that only claim it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlib.backends.triton import TritonBackend
from attnlib.device import DeviceInfo
from attnlib.spec import AttentionSpec
from attnlib.testing import certificate
from attnlib.testing.batch_variants import KINDS
from attnlib.testing.case import Case
from attnlib.testing.certificate import certify_batch_invariance
from attnlib.testing.checks import state_bits
from attnlib.testing.commands import verify_main
from attnlib.testing.states import cases
from attnlib.testing.states.certificate import STATE_KINDS, state_kinds
from tests.testing.toy_backend import ToyBackend
from tests.testing.wrong_backends import UNCERTIFIED
from tests.testing.wrong_states import RIGHT_STATES, WRONG_STATES


def test_torch_is_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints and writes what was compared, versions, and hashes."""
    path = tmp_path / "certificate.json"
    given = ["torch", "--device", "cpu", "--certify", "batch-invariance", "--json", str(path)]
    assert verify_main(given) == 0
    text = capsys.readouterr().out
    assert "declares it" in text and text.rstrip().endswith("PASSED")
    found = json.loads(path.read_text())
    assert found["passed"] and found["declared"] and found["certificate"] == "batch-invariance"
    assert found["backend_class"] == "attnlib.backends.torch:TorchBackend"
    assert {"torch", "triton", "commit", "command", "date"} <= set(found["provenance"])
    assert found["varied"] == [*KINDS, *STATE_KINDS]
    compared = [spec for spec in found["specs"] if not spec["unsupported"]]
    assert len(compared) == len(found["specs"]) >= 10
    assert all(len(spec["sha256"]) == 64 and not spec["different"] for spec in compared)
    # torch captures no graphs; everything else is compared for every decoder.
    assert set(compared[0]["compared"]) == set(KINDS) - {"CUDA graphs"}
    assert len({spec["sha256"] for spec in compared}) == len(compared)
    states = [spec for spec in compared if " states, " in spec["name"]]
    assert len(states) == 12 and all(set(s["compared"]) == set(STATE_KINDS) for s in states)


def test_only_kernels_that_ran_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend says about its kernels is no evidence that they ran."""

    class Explained(ToyBackend):
        @classmethod
        def explain_lines(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
            return ["prefill: another kernel"]

    found = certify_batch_invariance(Explained, device="cpu", quick=True)
    assert {spec.explanation for spec in found.specs} == {("prefill: another kernel",)}
    assert {spec.kernels for spec in found.specs} == {()}

    listed = [
        ("split_kernel", "CUDA"),
        ("attend_kernel", "CUDA"),
        ("attend_kernel", "CUDA"),
        ("void at::native::fill_kernel", "CUDA"),
        ("Memcpy DtoD (Device -> Device)", "CUDA"),
        ("cuLaunchKernelEx", "CPU"),
    ]
    batches = []

    class Profiler:
        def __enter__(self) -> Profiler:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> list[SimpleNamespace]:
            return [
                SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind))
                for name, kind in listed
            ]

    monkeypatch.setattr(certificate, "profile", lambda activities: Profiler())
    monkeypatch.setattr(certificate, "slice_batch", lambda step, requests: requests)
    monkeypatch.setattr(certificate, "_run", lambda target, part: batches.append(part))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    target = SimpleNamespace(on_gpu=True, device=None)
    names = certificate._kernels(target, None, [[0], [1], [0, 1]])  # type: ignore[arg-type]
    assert names == ("attend_kernel", "split_kernel") and batches == [[0], [1], [0, 1]]


def test_chosen_kinds_and_a_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind is printed when it is compared; what was not begun is no pass."""
    given = ["torch", "--device", "cpu", "--quick", "--certify", "batch-invariance", "--only"]
    assert verify_main([*given, "* states, *"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "gated delta states, float32",
        "short convolution states, float32",
    ]
    assert verify_main([*given, "gated*", "--limit-seconds", "0"]) == 1
    text = capsys.readouterr().out
    assert "gated delta states, float32: not run: no time was left" in text and "FAILED" in text


def test_hashes_follow_from_the_seed() -> None:
    """Two machines of one kind can be compared."""
    certificates = [
        certify_batch_invariance("torch", device="cpu", seed=seed, quick=True) for seed in (3, 3, 4)
    ]
    first, same, other = ([spec.sha256 for spec in each.specs] for each in certificates)
    assert first == same and not set(first) & set(other)


@pytest.mark.slow
def test_worker_processes_find_the_same() -> None:
    one, two = (
        certify_batch_invariance("torch", device="cpu", quick=True, jobs=jobs) for jobs in (1, 2)
    )
    assert one.specs == two.specs and two.passed


@pytest.mark.parametrize("error", UNCERTIFIED)
def test_backends_that_only_claim_it_fail(error: str) -> None:
    backend, kinds = UNCERTIFIED[error]
    found = certify_batch_invariance(backend, device="cpu", quick=True)
    assert found.declared and not found.passed
    for spec in found.specs:
        if " states, " in spec.name:  # the error is one of attention
            continue
        assert set(spec.different or {}) == kinds
        assert spec.failures and str(found).endswith("FAILED")


def test_a_backend_that_does_not_declare_it_is_compared_too() -> None:
    found = certify_batch_invariance(ToyBackend, device="cpu", quick=True)
    assert not found.declared and "does not declare it" in str(found)
    assert all(spec.compared for spec in found.specs)


def test_states_that_only_claim_it_fail() -> None:
    """A backend of state layers alone: chunks that begin where a step begins, and a right one."""
    wrong, right = (
        certify_batch_invariance(backend, device="cpu", quick=True)
        for backend in (WRONG_STATES["chunks from the start of a step"][0], RIGHT_STATES["tail"])
    )
    assert wrong.declared and not wrong.passed and right.passed
    assert {spec.name for spec in right.specs} == {
        "gated delta states, float32",
        "short convolution states, float32",
    }
    assert set(wrong.specs[0].different or {}) >= {"single tokens", "steps", "rejected drafts"}
    undeclared = certify_batch_invariance(RIGHT_STATES["plain"], device="cpu", quick=True)
    assert not undeclared.declared and not undeclared.passed
    assert undeclared.specs[0].unsupported


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_large_heads_of_states(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has kernels that the small heads do not reach."""
    info = DeviceInfo("cuda", capability=(9, 0), is_hypothetical=True)
    monkeypatch.setattr(cases, "resolve_device", lambda device: info)
    target = SimpleNamespace(
        backend=TritonBackend, device=torch.device(device), kinds=("state",), quick=False,
        state_dtype=torch.float32,
    )  # fmt: skip
    names = [name for name, _ in state_kinds(target)]  # type: ignore[arg-type]
    assert sum("large heads" in name for name in names) == 5 * (device == "cuda")
    (check,) = state_bits.CHECKS
    found = {case.id: case.state_spec for case in check.cases(target)}  # type: ignore[arg-type]
    assert len(found) == 6 + 5 * (device == "cuda")
    for name in ("gated-delta-large", "mamba2-large") if device == "cuda" else ():
        spec = found[name]
        assert spec is not None and (spec.dtype, spec.key_size) == (torch.bfloat16, 128)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton is not interpreted")
def test_triton_is_certified_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants of one kind of layer; the tests of the operations have the other features."""
    kinds = certificate._cases

    def one_kind(*given: Any) -> Iterator[tuple[str, Case]]:
        for name, case in islice(kinds(*given), 1, 2):
            yield name, case.replace(num_heads=4, num_kv_heads=1)

    monkeypatch.setattr(certificate, "_cases", one_kind)
    found = certify_batch_invariance("triton", device="cpu", quick=True)
    assert found.passed and found.declared, found
    assert [spec.name for spec in found.specs if " states, " not in spec.name] == ["log-sum-exp"]
    assert set(found.specs[0].compared) == set(KINDS)
