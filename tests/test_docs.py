"""Nothing is shown that is not run: Python blocks run in order, and the text block behind a block is what it prints."""

import contextlib
import importlib.util
import io
import os
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


MEASURED = (
    (re.compile(r"\b\d+(\.\d+)? s\b"), "T s"),
    (re.compile(r"\b\d+ tokens/s\b"), "N tokens/s"),
    (re.compile(r"(?<=logit error )\d\.\de-\d+"), "E"),
)
OPTIONAL = [name for name in ("flash_attn", "flashinfer") if importlib.util.find_spec(name)]
"""Installed here, they say something else than the pages, which are written without them."""


def _plain(text: str) -> str:
    """Without what no two runs share (times, roundings), and without what installed optional packages say."""
    for pattern, stand_in in MEASURED:
        text = pattern.sub(stand_in, text)
    for name in OPTIONAL:
        text = re.sub(rf"^  {name} .*\n(?: {{12,}}.*\n)*", "", text, flags=re.M)
    return text.strip()


def _same(shown: str, printed: str) -> bool:
    return _plain(shown + "\n") == _plain(printed + "\n")


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_is_shown(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("ATTNLIB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ATTNLIB_PLUGINS", "0")
    monkeypatch.setenv("ATTNLIB_TUNING", "off")
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
                assert _same(body, printed), (
                    f"{page.name} shows\n{body}\nand the block before it prints\n{printed}"
                )
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
        for command, shown in re.findall(
            r"^\$ attnlib ([^\n]*)\n(.*?)(?=^\$ |\Z)", body, re.M | re.S
        ):
            done = subprocess.run(
                [sys.executable, "-m", "attnlib", *command.split()],
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=_fresh(),
            )
            assert done.returncode == 0, (
                f"attnlib {command} of {page.name} ends with {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
            rest = _plain(done.stdout)
            for part in (
                _plain(piece) for piece in re.split(r"^\.\.\.$", shown, flags=re.M) if piece.strip()
            ):
                assert part in rest, (
                    f"{page.name} shows {part!r}, but attnlib {command} prints\n{done.stdout}\n{done.stderr}"
                )
                rest = rest.split(part, 1)[1]


_SILENT = {"ATTNLIB_PLUGINS": "0", "ATTNLIB_TUNING": "off"}


def _fresh() -> dict[str, str]:
    """The environment of a reader who has set nothing."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ATTNLIB_", "TRITON_INTERPRET"))
    } | _SILENT


def test_recorded_outputs_are_quotations() -> None:
    """A text block behind a link to a record shows lines of that record, in its order."""
    readme = (ROOT / "README.md").read_text()
    found = re.findall(
        r"\]\((benchmarks/results/[^)]+\.txt)\)[^\n]*\n\n```text\n(.*?)^```$", readme, re.M | re.S
    )
    assert found
    for record, shown in found:
        recorded = (ROOT / record).read_text().splitlines()
        places = [recorded.index(line) for line in shown.splitlines() if line != "..."]
        assert places == sorted(places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#][^)]*)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"


def test_the_first_screen_is_short() -> None:
    """One sentence, two commands, code, its output, the exam and a signpost, in at most 45 lines."""
    screen = (ROOT / "README.md").read_text().split("\n## ")[0].rstrip().splitlines()
    assert len(screen) <= 45, f"the README's first screen has {len(screen)} lines"
    assert screen.index("```python") < 15
    for needed in ("What it is not", "attnlib demo", "pytest", "$ attnlib verify", "| I want to"):
        assert any(needed in line for line in screen), needed


def test_generated_pages_are_as_generated() -> None:
    """docs/environment.md and docs/support.md are what `python docs/generate.py` writes today."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, text in generate.pages().items():
        assert (ROOT / "docs" / name).read_text() == text, (
            f"docs/{name} has drifted: run python docs/generate.py"
        )


def test_architecture_names_what_is_there() -> None:
    """Every module that the page names exists, and every room of the package stands in its drawing."""
    page, package = (ROOT / "docs" / "architecture.md").read_text(), ROOT / "attnlib"
    named = set(re.findall(r"`(?:attnlib/)?([a-z_]+(?:/[a-z_]+)*\.py)`", page))
    files = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    missing = {
        name
        for name in named
        if not any(file == name or file.endswith(f"/{name}") for file in files)
    }
    missing -= {name for name in named if (ROOT / name).exists()}
    assert not missing, f"docs/architecture.md names {sorted(missing)}, which do not exist"
    drawing = next(
        body
        for language, body in _blocks(ROOT / "docs" / "architecture.md")
        if body.startswith("attnlib/")
    )
    rooms = {
        path.name
        for path in package.iterdir()
        if path.suffix == ".py" and not path.name.startswith("__")
    }
    rooms |= {
        f"{path.parent.name}/" for path in package.rglob("__init__.py") if path.parent != package
    }
    absent = {room for room in rooms if not re.search(rf"(?<![\w]){re.escape(room)}", drawing)}
    assert not absent, f"{sorted(absent)} stand in no room of docs/architecture.md"


def test_the_readmes_commands_are_what_ci_runs() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert (
        'pip install -e ".[test]" && pytest' in readme
        and 'pip install -e ".[test]"' in ci
        and "pytest" in ci.splitlines()[-1]
    )


def test_the_check_of_shown_output_can_fail() -> None:
    assert _same("ran in 1.0 s, logit error 1.0e-06", "ran in 22 s, logit error 2.3e-07")
    assert not _same("3 pass", "4 pass") and not _same("logit error 1.0e-06", "logit error inf")
