"""Nothing is shown that is not run: Python blocks run in order, and the text block behind a block is what it prints."""

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attnlib

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDES = ("write-a-backend.md", "test-your-backend.md")
"""Their blocks are fragments around a backend of the reader's: tests/testing/test_docs.py runs them, each in its place."""
RUN = [page for page in PAGES if page.name not in GUIDES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def _blocks(page: Path) -> list[tuple[str, str]]:
    return [(language, body) for language, body in FENCE.findall(page.read_text())]


def _same(shown: str, printed: str) -> bool:
    """Equal but for times, which no two runs share."""
    times = re.compile(r"\b\d+(\.\d+)? s\b")
    return times.sub("T s", shown.strip()) == times.sub("T s", printed.strip())


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_is_shown(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    monkeypatch.syspath_prepend(ROOT)
    before = set(attnlib.list_backends())
    namespace: dict = {"__name__": f"docs_{page.stem}"}
    printed = ""
    try:
        for language, body in _blocks(page):
            if language == "python":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(body, str(page), "exec"), namespace)
                printed = out.getvalue()
            elif language == "text" and printed:
                assert _same(body, printed), f"{page.name} shows\n{body}\nand the block before it prints\n{printed}"
                printed = ""
    finally:
        for name in set(attnlib.list_backends()) - before:
            attnlib.unregister_backend(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_print_what_is_shown(page: Path) -> None:
    """`$ attnlib ...` in a console block, with `...` for lines that are left out."""
    for language, body in _blocks(page):
        if language != "console":
            continue
        for command, shown in re.findall(r"^\$ attnlib ([^\n]*)\n(.*?)(?=^\$ |\Z)", body, re.M | re.S):
            done = subprocess.run([sys.executable, "-m", "attnlib", *command.split()], capture_output=True, text=True, cwd=ROOT)
            rest = done.stdout
            for part in (piece.strip() for piece in re.split(r"^\.\.\.$", shown, flags=re.M) if piece.strip()):
                times = re.compile(r"\b\d+(\.\d+)? s\b")
                wanted, have = times.sub("T s", part), times.sub("T s", rest)
                assert wanted in have, f"{page.name} shows {part!r}, but attnlib {command} prints\n{done.stdout}\n{done.stderr}"
                rest = have.split(wanted, 1)[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#][^)]*)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"


def test_the_first_screen_is_short() -> None:
    """One sentence, two commands, code, output: within 75 lines."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```python") < 15 and any("What it is not" in line for line in lines[:80])


def test_generated_pages_are_as_generated() -> None:
    """docs/environment.md and docs/support.md are what `python docs/generate.py` writes today."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, text in generate.pages().items():
        assert (ROOT / "docs" / name).read_text() == text, f"docs/{name} has drifted: run python docs/generate.py"


def test_the_readmes_commands_are_what_ci_runs() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert 'pip install -e ".[test]" && pytest' in readme and 'pip install -e ".[test]"' in ci and "pytest" in ci.splitlines()[-1]


def test_the_check_of_shown_output_can_fail() -> None:
    assert _same("ran in 1.0 s", "ran in 22 s") and not _same("3 pass", "4 pass")
