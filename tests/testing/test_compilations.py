"""Compilations are counted, without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnlib.testing.compilations import compiled_kernels

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytest.importorskip("triton.backends.nvidia.compiler", reason="needs Triton's NVIDIA backend")


def stored_one(x):
    tl.store(x, 1)


@pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="as Triton")
def test_compilations_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compilation counts once, from the disk cache too; the listener before is called, and is
    there again afterwards."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    seen: list[bool] = []
    listener = lambda *, cache_hit, **facts: seen.append(cache_hit)  # noqa: E731
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    source = ASTSource(JITFunction(stored_one), {"x": "*i32"}, {})
    with compiled_kernels() as compiled:
        for _ in range(2):
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
    name, is_gluon = "stored_one", False
    assert [tuple(one) for one in compiled] == [(name, is_gluon, found) for found in (False, True)]
    assert seen == [False, True] and triton.knobs.compilation.listener is listener


def test_lists_may_end_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of two threads do; the listener of others stays throughout."""
    knobs = triton.knobs.compilation
    heard: list[str] = []

    def own(*, src: Any, **facts: Any) -> None:
        heard.append(src.name)

    monkeypatch.setattr(knobs, "listener", own)

    def compile_one(name: str) -> None:
        knobs.listener(src=SimpleNamespace(name=name), cache_hit=False)

    first, second = compiled_kernels(), compiled_kernels()
    of_first = first.__enter__()
    compile_one("a")
    of_second = second.__enter__()
    compile_one("b")
    first.__exit__(None, None, None)
    compile_one("c")
    second.__exit__(None, None, None)
    assert knobs.listener is own
    compile_one("d")
    assert [kernel.name for kernel in of_first] == ["a", "b"]
    assert [kernel.name for kernel in of_second] == ["b", "c"]
    assert heard == ["a", "b", "c", "d"]
