"""Running other packages' tests against attnlib.compat: the changes on load, and the outcomes."""

from __future__ import annotations

import argparse
import ast
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.upstream_tests.rewrite import checks_gradients_only, rewrite
from benchmarks.upstream_tests.runner import run_module

ROOT = Path(__file__).parents[2]

SOURCE = """
import pytest
import torch
from attnlib.errors import UnsupportedConfigError

@pytest.mark.parametrize("kind", ["right", "wrong", "refused", "skipped"])
@pytest.mark.parametrize("a,b", [(1, 2), (3, 900)])
def test_output(a, b, kind):
    q = torch.ones(2, device="cuda:0", requires_grad=True)
    out = 2 * q.to(0)
    if kind == "refused":
        raise UnsupportedConfigError("no such thing")
    if kind == "skipped":
        pytest.skip("not today")
    g = torch.randn_like(out)
    if a:
        (dq,) = torch.autograd.grad(out, (q,), g)
        half = dq / 2
    print(half)
    assert (out == 2).all() and kind == "right"
    assert (half == g).all()
    if half.sum() > 0:
        print("positive")

def test_gradient_of_something():
    q = torch.ones(2, requires_grad=True)
    q.sum().backward()
    assert (q.grad == 1).all()

def test_something_else():
    assert False
"""


def test_gradients_and_what_depends_on_them_are_removed() -> None:
    tree = rewrite(SOURCE, "cpu")
    text = ast.unparse(tree)
    assert "autograd" not in text and "half" not in text and "positive" not in text
    assert "assert (out == 2).all() and kind == 'right'" in text
    assert "device='cpu'" in text and "q.to('cpu')" in text and "cuda" not in text
    tests = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = {name: checks_gradients_only(node, SOURCE) for name, node in tests.items()}
    assert found == {
        "test_output": False,
        "test_gradient_of_something": True,
        "test_something_else": False,
    }
    assert "device='cuda:0'" in ast.unparse(rewrite(SOURCE, "cuda"))


def test_outcomes_are_counted(tmp_path: Path) -> None:
    """Every case of the grid but the excluded ones, each in one class; a failure is wrong."""
    path = tmp_path / "test_others.py"
    path.write_text(SOURCE)
    options = argparse.Namespace(
        device="cpu", sample=100, seed=0, largest=100, seconds=3600, shard=0, shards=1,
        end=math.inf, only=None,
    )  # fmt: skip
    output, gradient, other = run_module(path, ("output", "gradient"), options, {})
    assert (output.cases, output.excluded) == (8, 4)
    assert output.counts == {"passed": 1, "wrong": 1, "refused": 1, "skipped": 1}
    assert output.reasons == {"refused: no such thing": 1, "skipped by the test: not today": 1}
    assert "'kind': 'wrong'" in output.wrong[0] and "AssertionError" in output.wrong[0]
    assert gradient.note == "checks the backward pass only" and not gradient.counts
    assert other.note == "tests other functions"
    (skipped, _, _) = run_module(path, ("output",), options, {"_out": "a reason"})
    assert skipped.note == "a reason"
    options.only = ["gradient", "else"]
    found = run_module(path, ("output",), options, {})
    assert [x.test.partition("::")[2] for x in found] == [
        "test_gradient_of_something",
        "test_something_else",
    ]


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    """A copy whose test calls a function of the package: it reaches attnlib, in two processes."""
    (tmp_path / "tests").mkdir()
    for folder in ("flash_attn/layers", "flash_attn/ops/triton"):
        (tmp_path / folder).mkdir(parents=True)
    for helper in ("bert_padding", "layers/rotary"):
        (tmp_path / "flash_attn" / f"{helper}.py").write_text("")
    (tmp_path / "tests" / "test_flash_attn.py").write_text(
        "import pytest, torch\n"
        "from flash_attn import flash_attn_func\n"
        "from flash_attn.unknown import something\n"
        "@pytest.mark.parametrize('causal', [True, False])\n"
        "def test_shapes(causal):\n"
        "    q = torch.randn(1, 3, 2, 16, device='cuda')\n"
        "    out = flash_attn_func(q, q, q + 1, causal=causal)\n"
        "    assert torch.equal(out[:, 0], (q + 1)[:, 0]) == causal\n"
        "def test_not_provided():\n"
        "    assert something(flash_attn_func)\n"
    )
    command = [sys.executable, "-m", "benchmarks.upstream_tests", "flash_attn", "--source",
               str(tmp_path), "--device", "cpu", "--shards", "2", "--out",
               str(tmp_path / "out.json")]  # fmt: skip
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_shapes: 2 cases: 2 passed" in run.stdout
    assert "1 refused: flash_attn.unknown.something is not part of attnlib.compat" in run.stdout
    assert (tmp_path / "out.json").stat().st_size
