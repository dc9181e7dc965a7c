"""Fakes and calls of adapters fit the recorded signatures of the real packages."""

from __future__ import annotations

import ast
import copy
import inspect
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.backends.flashinfer.mla.wrapper import find_mla_wrapper
from attnlib.backends.flashinfer.probe import find_api
from tests.backends import fake_flash_attn, fake_flashinfer
from tests.backends.flash_attn import adapter as flash_attn
from tests.backends.flashinfer import adapter as flashinfer
from tests.backends.flashinfer import fake_mla
from tests.backends.real_signatures import RECORDED, like, signature_of
from tests.backends.record_signatures import RELEASES, Release, parameters, record
from tests.backends.steps import make_step

FA4 = fake_flash_attn.FA4


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches = (find_kernels, find_api, signature_of)
    fake_flash_attn.nothing_installed(monkeypatch)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def rename(monkeypatch: pytest.MonkeyPatch, release: str, function: str, name: str) -> None:
    """Record another name for one argument of a real function."""
    changed = copy.deepcopy(RECORDED[release][function])
    (found,) = (parameter for parameter in changed if parameter[0] == name)
    found[0] = f"new_{name}"
    monkeypatch.setitem(RECORDED[release], function, changed)
    signature_of.cache_clear()


def test_the_file_has_the_functions_of_the_script() -> None:
    expected = {
        f"{release.name} {release.version}": {
            name for names in release.functions.values() for name in names
        }
        for release in RELEASES
    }
    assert {release: set(functions) for release, functions in RECORDED.items()} == expected


def test_a_fake_with_a_renamed_argument_fails() -> None:
    def fake(q: Any, k: Any, windows_size: Any) -> None: ...

    with pytest.raises(TypeError, match="flash-attn-4 4.0.0b36 has no argument windows_size"):
        like(FA4, "flash_attn_varlen_func")(fake)


@pytest.mark.parametrize(
    ("release", "function", "name"),
    [
        (fake_flash_attn.FA2, "flash_attn_varlen_func", "block_table"),
        (fake_flash_attn.FA2, "flash_attn_with_kvcache", "page_table"),
        *((release, "flash_attn_varlen_func", "s_aux") for release in fake_flash_attn.VLLM),
        (FA4, "flash_attn_varlen_func", "num_splits"),
    ],
)
def test_fakes_of_flash_attention_follow_the_record(
    monkeypatch: pytest.MonkeyPatch, release: str, function: str, name: str
) -> None:
    """A real argument that is renamed is missed when the fake is made."""
    rename(monkeypatch, release, function, name)
    install = flash_attn.install_fa4 if release == FA4 else flash_attn.install_fa3
    if release in fake_flash_attn.VLLM:
        install = partial(flash_attn.install_vllm, release=release)
    elif release != FA4 and function == "flash_attn_varlen_func":
        install = flash_attn.install_fa2
    with pytest.raises(TypeError, match=f"{release} has no argument {name}"):
        install(monkeypatch, fake_flash_attn.Recorder())


def test_a_call_of_flash_attention_with_a_renamed_argument_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`max_seqlen_q` is not read by the fake: the call itself does not fit."""
    rename(monkeypatch, FA4, "flash_attn_varlen_func", "max_seqlen_q")
    flash_attn.install_fa4(monkeypatch, fake_flash_attn.Recorder())
    step = make_step(flash_attn.spec_of(), [1, 4], [30, 20])
    with pytest.raises(TypeError, match="max_seqlen_q"):
        flash_attn.run(monkeypatch, step)


@pytest.mark.parametrize("release", fake_flashinfer.RELEASES)
@pytest.mark.parametrize(("kind", "lengths"), [("Decode", [1, 1]), ("Prefill", [5, 4])])
def test_a_plan_of_flashinfer_with_a_renamed_argument_fails(
    monkeypatch: pytest.MonkeyPatch, release: str, kind: str, lengths: list[int]
) -> None:
    recorded = f"flashinfer-python {release}"
    wrapper = f"Batch{kind}WithPagedKVCacheWrapper"
    inner = f"{wrapper}._plan_impl"
    function = inner if inner in RECORDED[recorded] else f"{wrapper}.plan"
    rename(monkeypatch, recorded, function, "non_blocking")
    fake_flashinfer.install(monkeypatch, fake_flashinfer.Recorder(), release)
    step = make_step(flashinfer.spec_of(), lengths, [30, 20])
    with pytest.raises(TypeError, match="non_blocking"):
        flashinfer.builder_for(monkeypatch, step.spec).build(0, step.common)


@pytest.mark.parametrize("release", fake_flashinfer.RELEASES)
def test_the_probes_accept_the_recorded_releases(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    fake_mla.install(monkeypatch, release)
    api, problem = find_api(None)
    assert api is not None and api.release == release, problem
    latent, problem = find_mla_wrapper(None)
    assert latent is not None and (latent.batch is None) is (release in fake_mla.FLAT), problem


def test_defaults_are_those_of_the_package() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in signature_of(FA4, "flash_attn_varlen_func").parameters.items()
    }
    assert defaults["window_size"] == (None, None) and defaults["num_splits"] == 1
    assert defaults["q"] is inspect.Parameter.empty


SOURCE = '''
class Wrapper:
    @overload
    def run(self, q, *, out: Tensor) -> Tensor: ...
    def run(self, q, /, k=(-1, 0), *rest: Any, out: Tensor | None = None, scale, **more) -> Tensor:
        """Not recorded."""
'''


def test_recording_reads_the_last_definition(tmp_path: Path) -> None:
    """Names, kinds and defaults of an archive; a moved function is an error."""
    release = Release("a-package", "1.0", {"a_package/wrapper.py": ("Wrapper.run",)})
    wheel = tmp_path / f"{release.stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a_package/wrapper.py", SOURCE)
    assert record(release, wheel)["Wrapper.run"] == [
        ("self", "POSITIONAL_ONLY", None),
        ("q", "POSITIONAL_ONLY", None),
        ("k", "POSITIONAL_OR_KEYWORD", "(-1, 0)"),
        ("rest", "VAR_POSITIONAL", None),
        ("out", "KEYWORD_ONLY", "None"),
        ("scale", "KEYWORD_ONLY", None),
        ("more", "VAR_KEYWORD", None),
    ]
    with pytest.raises(LookupError, match=r"no definition of Wrapper\.plan"):
        parameters(ast.parse(SOURCE), "Wrapper.plan")
