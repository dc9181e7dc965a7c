"""The steps of a warm-up: a survey, and notes for later processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.integrations.vllm.warm import GroupWarmup
from attnlib.kv_formats.builtin import PAGE_FORMATS
from attnlib.layer import Attention
from attnlib.layer.warmup_facts import kernel_facts
from attnlib.layer.warmup_steps import first_uses, run_steps
from attnlib.score_functions.spans import prefix_lm
from attnlib.spec import AttentionSpec, MaskKind
from attnlib.workspace import BatchLimits
from tests.fresh_process import run_module

LIMITS = BatchLimits(max_num_reqs=2, max_num_tokens=16, max_seq_len=64)
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def test_steps_that_need_a_kernel_first() -> None:
    used = [{1, 2}, {2}, set(), {2, 3}, {1, 3}, {4}]
    assert first_uses(map(frozenset, used)) == [0, 3, 5]


def test_without_kernels_every_step_runs_once() -> None:
    ran: list[int] = []
    run_steps(
        [lambda number=number: ran.append(number) for number in range(3)], torch.device("cpu")
    )
    assert ran == [0, 1, 2]


@pytest.mark.slow
def test_a_surveyed_warmup_covers_random_batches_with_and_without_a_note(tmp_path: Path) -> None:
    """Threads compile, everything compiled is launched, and the next process runs few batches."""
    pytest.importorskip("triton")
    first, second = (_run_module("tests.described_warmup", tmp_path) for _ in range(2))
    assert first["found"] == [] and second["compiled"] == []
    assert second["found"] == first["compiled"]
    assert {"hopper_prefill_kernel", "decode_kernel"} <= set(first["compiled"])
    for result in (first, second):
        assert result["late"] == []
        assert result["launched"] == sorted(set(first["compiled"]))
    assert 2 * second["batches"] < first["batches"]


@pytest.mark.slow
def test_kernels_compiled_for_an_engine_have_the_note_of_its_warmup(tmp_path: Path) -> None:
    """The first start surveys nothing but its steps, unless its limits differ."""
    pytest.importorskip("triton")
    from tests.described_server import ARGUMENTS

    written, shipped = tmp_path / "written", tmp_path / "shipped"
    options = ["--engine", "vllm", "--device", "H100", *ARGUMENTS, "--out", str(written)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = run_module("attnlib", ["compile", *options, "--processes", "2"], environment)
    assert done.returncode == 0, done.stderr[-4000:]
    written.rename(shipped)

    def start(name: str, *limits: str) -> dict[str, Any]:
        return _run_module("tests.described_warmup", tmp_path / name, *limits, kernels=shipped)

    found, longer = start("noted"), start("longer", "112")
    (note,) = shipped.rglob("attnlib_warmup.json")
    steps = json.loads(note.read_text())
    note.unlink()
    surveyed = start("surveyed")
    assert json.loads((tmp_path / "surveyed" / note.relative_to(shipped)).read_text()) == steps
    assert found["compiled"] == found["late"] == surveyed["compiled"] == []
    assert found["found"] == surveyed["found"] == longer["found"] != []
    # Its batches run for the loading of kernels and for launches; its last step has none.
    assert found["batches"] == 2 * (len(steps) - 1)
    assert min(longer["batches"], surveyed["batches"]) > 2 * found["batches"]


def test_a_survey_leaves_other_threads_alone(tmp_path: Path) -> None:
    """Their launches run, those of the surveyed thread do not, also of kernels that are not new;
    one survey at a time replaces Triton's methods, and they come back."""
    pytest.importorskip("triton")
    found = _run_module("tests.surveyed_threads", tmp_path)
    assert found["known"] == found["new"] == 1 and found["during"] == ["other", "other"]
    assert found["after"] == ["MainThread"]
    assert found["second"] == [None] and found["is_free"]
    assert found["is_restored"] and found["left"] == ["NoneType"]


def _run_module(
    name: str, cache: Path, *arguments: str, kernels: Path | None = None
) -> dict[str, Any]:
    """The last line that a module prints, in a process that compiles Triton's kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {} if kernels is None else {"ATTNLIB_KERNELS": str(kernels)}
    command = [sys.executable, "-m", name, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    knobs = pytest.importorskip("triton").knobs
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield tmp_path


def test_keys_wait_for_what_was_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's library is read once, in a thread."""
    cache = pytest.importorskip("triton").runtime.cache
    from attnlib.ops.triton.launch import keys

    events: list[str] = []

    def read() -> str:
        time.sleep(0.2)
        events.append("read")
        return ""

    def key(*facts: Any, **more: Any) -> str:
        events.append("key")
        return "key"

    monkeypatch.setattr(cache, "triton_key", read)
    monkeypatch.setattr(cache, "get_cache_key", key)
    monkeypatch.setattr(keys, "_READING", [])
    for _ in range(2):
        keys.read_ahead()
    source: Any = type("Source", (), {"parse_options": lambda self: {}})()
    backend: Any = type("Backend", (), {"parse_options": lambda self, given: given})()
    assert len(keys.kernel_key(source, backend, source)) == 64
    assert events == ["read", "key"]


def test_notes_are_read_under_the_same_facts_only(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlib.ops.triton.launch.notes import read_note, write_note

    assert read_note("facts", 9) is None
    write_note("facts", [0, 8])
    assert read_note("facts", 9) == [0, 8]
    assert read_note("facts", 8) is None and read_note("others", 9) is None
    for name in ("ATTNLIB_KERNELS", "TRITON_CACHE_AUTOTUNING", "TRITON_STORE_BINARY_ONLY"):
        monkeypatch.setenv(name, "1")  # choose no kernels; vLLM sets the second one
    assert read_note("facts", 9) == [0, 8]
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    assert read_note("facts", 9) is None
    monkeypatch.delenv("ATTNLIB_BACKEND")
    (file,) = cache.rglob("attnlib_warmup.json")
    for broken in ("", "{}", "[1.5]", "[true]", "[]"):
        file.write_text(broken)
        assert read_note("facts", 9) is None, broken


def test_facts_are_known_for_own_kernels_on_a_gpu_only() -> None:
    """Elsewhere there are no kernels, or a warm-up cannot know what decides them."""
    layer = Attention(SPEC, device="cpu")
    builder = layer.backend.make_builder(SPEC, torch.device("cpu"), limits=LIMITS)
    cache = PagedKVCache.allocate(SPEC, 4, "cpu")
    assert kernel_facts(layer, cache, LIMITS, builder, 4) is None


def test_facts_name_what_decides_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the number of blocks; layouts, limits, scales and settings of the builder."""
    pytest.importorskip("triton")
    from attnlib.backends.triton.described import DescribedTritonBackend
    from attnlib.ops.triton.heuristics import device

    names, chip = ["H100"], device.INTERPRETER_LIMITS
    monkeypatch.setattr(device, "device_limits", lambda where: replace(chip, name=names[-1]))

    def facts(
        changes: Any = (), *, blocks: int = 4, scale: float | None = None, columns: int = 4,
        limits: BatchLimits = LIMITS, config: Any = None,
    ) -> str | None:  # fmt: skip
        spec = SPEC.replace(**dict(changes))
        layer = Attention(spec, backend=DescribedTritonBackend, scale=scale, device="cpu")
        cache = PagedKVCache.allocate(spec, blocks, "cpu")
        builder = layer.backend.make_builder(spec, torch.device("cpu"), limits=limits)
        builder.config, builder.device = dict(config or {}), torch.device("cuda:0")
        return kernel_facts(layer, cache, limits, builder, columns)

    known = facts()
    assert known is not None and known == facts(blocks=9)
    wider = BatchLimits(max_num_reqs=3, max_num_tokens=16, max_seq_len=64)
    others = [
        facts({"kv_cache_layout": "HND_INTERLEAVED"}), facts({"kv_cache_dtype": "fp8"}),
        facts({"head_size": 128}), facts(scale=0.0), facts(columns=5), facts(limits=wider),
        facts(config={"kernels": "portable"}),
    ]  # fmt: skip
    assert facts(scale=0.5) == known  # no kernel is specialized on it
    names.append("H200")
    others.append(facts())
    names.append("NVIDIA H100 80GB HBM3")  # as attnlib compile --device H100
    assert facts() == known
    assert None not in others and len({known, *others}) == 1 + len(others)
    wide = {"head_size": 128, "kv_rotation": "hadamard"}
    stored = [facts(wide | {"kv_cache_dtype": name}) for name in sorted(PAGE_FORMATS)]
    assert None not in stored and len({known, *others, *stored}) == 1 + len(others) + len(stored)
    for text in (known, *others, *stored):
        assert text is not None and " at 0x" not in text  # the same in another process
    assert facts({"score_function": prefix_lm(), "mask_kind": MaskKind.BIDIRECTIONAL}) is None


class _Layer:
    """Of vLLM, as far as a warm-up reads it."""

    def __init__(self) -> None:
        self.runs, self.key = 0, "of a small cache"

    def warmup_key(self, layer: Any) -> str:
        return self.key

    def warm_up(self, layer: Any, builder: Any, shared: bool) -> None:
        self.runs += 1


class _Builder:
    def __init__(self, layer: _Layer) -> None:
        self._layer = layer

    def take_layers(self) -> list[_Layer]:
        return [self._layer]


def test_builders_of_the_same_layers_warm_up_once() -> None:
    """vLLM makes builders for a small cache before those that serve."""
    config: Any = type("Config", (), {"kernel_config": None})()
    config.model_config = type("Model", (), {"enforce_eager": False})()
    layer = _Layer()
    for key, runs in (("small", 1), ("small", 1), ("other strides", 2)):
        layer.key = key
        group = GroupWarmup(_Builder(layer), config)
        group.run(between_batches=True)
        assert layer.runs == runs and not group.pending
