"""Documentation tests: code blocks run, shown output is what they print, links resolve."""

import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import attnlib
from attnlib import example_model
from attnlib.backends.cascade.schedule import PrefixRule
from attnlib.bench.suites import SUITES
from attnlib.integrations.transformers.state_mixers import SERVED
from attnlib.selection import unregister_backend
from tests import example_checkpoint
from tests.cli.parsers import parsers
from tests.fresh_process import run_module
from tests.generated_pages import generator
from tests.test_architecture import LAYERS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
FRAGMENTS = ("write-a-backend.md", "test-your-backend.md")
"""Their blocks assume a backend of the reader. tests/testing/test_docs.py runs them."""
RUN = [page for page in PAGES if page.name not in FRAGMENTS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PARTS = {"tutorial-engine.md": ROOT / "examples" / "tutorial_engine.py"}
"""Pages whose Python blocks together are the beginning of a program, an example."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each code block."""
    return FENCE.findall(page.read_text())


MEASURED = (
    (re.compile(r"\b\d+(\.\d+)? s\b"), "T s"),
    (re.compile(r"\b\d+ tokens/s\b"), "N tokens/s"),
    (re.compile(r"(?<=logit error )\d\.\de-\d+"), "E"),
    (re.compile(r"\b[1-9]\d*(?= (cases|passed|unsupported) · )"), "N"),  # the suite grows
    (re.compile(r"(?<=sha256 )[0-9a-f]{16}"), "H"),  # the last bits depend on the processor
)
OPTIONAL = [name for name in ("flash_attn", "flashinfer") if importlib.util.find_spec(name)]
"""The pages are written without these packages; with them, a report shows other lines."""


def _plain(text: str) -> str:
    """The text without measured numbers and without the lines of installed optional packages."""
    for pattern, replacement in MEASURED:
        text = pattern.sub(replacement, text)
    for name in OPTIONAL:
        text = re.sub(rf"^  {name} .*\n(?: {{12,}}.*\n)*", "", text, flags=re.M)
    return text.strip()


def _same(shown: str, printed: str) -> bool:
    return _plain(shown + "\n") == _plain(printed + "\n")


def _programs(page: Path) -> list[tuple[str, str]]:
    """The blocks of a page; of an example the whole program, which prints the last text without
    the example model."""
    blocks = _blocks(page)
    if page.name not in PARTS:
        return blocks
    source = PARTS[page.name].read_text().split('"""', 2)[2]
    return [("python", source), [block for block in blocks if block[0] == "text"][-1]]


@pytest.mark.parametrize("name", PARTS)
def test_pages_show_whole_parts_of_the_example(name: str) -> None:
    """The blocks of the page are the first lines of the example, without its docstring, up to a
    function or class that the page only names."""
    (page,) = DOCS.rglob(name)
    blocks = "\n".join(body for language, body in _blocks(page) if language == "python")
    shown = [line for line in blocks.splitlines() if line]
    source = [line for line in _programs(page)[0][1].splitlines() if line]
    assert len(shown) > 150
    assert shown == source[: len(shown)]
    following = re.match(r"(?:def|class) (\w+)", source[len(shown)])
    assert following and f"`{following[1]}`" in page.read_text()


@pytest.mark.parametrize("page", RUN, ids=_name)
def test_python_blocks_run_and_print_what_is_shown(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The blocks of a page run in order; a text block after a block is its output."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of `mkdtemp`
    for name in [name for name in os.environ if name.startswith("ATTNLIB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ATTNLIB_PLUGINS", "0")
    monkeypatch.setenv("ATTNLIB_TUNING", "off")
    monkeypatch.syspath_prepend(ROOT)
    example_checkpoint.uninstall(monkeypatch)
    before = set(attnlib.list_backends())
    module = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    printed = ""
    try:
        for language, body in _programs(page):
            if language == "python":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(body, str(page), "exec"), module.__dict__)
                printed = out.getvalue()
            elif language == "text" and printed:
                assert _same(body, printed), (
                    f"{page.name} shows\n{body}\nand the block before it prints\n{printed}"
                )
                printed = ""
    finally:
        for name in set(attnlib.list_backends()) - before:
            unregister_backend(name)


@functools.cache
def _attnlib(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command once, also if several pages show it."""
    return run_module("attnlib", command.split(), _fresh())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_print_what_is_shown(page: Path) -> None:
    """`$ attnlib ...` in a console block; `...` stands for omitted lines."""
    for language, body in _blocks(page):
        if language != "console":
            continue
        for command, shown in re.findall(
            r"^\$ attnlib ([^\n]*)\n(.*?)(?=^\$ |\Z)", body, re.M | re.S
        ):
            if command.startswith("demo") and not example_model.is_installed():
                continue  # CI installs the model
            done = _attnlib(command)
            assert done.returncode == 0, (
                f"attnlib {command} of {page.name} ends with {done.returncode}\n"
                f"{done.stdout}\n{done.stderr}"
            )
            rest = _plain(done.stdout)
            for part in (
                _plain(piece) for piece in re.split(r"^\.\.\.$", shown, flags=re.M) if piece.strip()
            ):
                assert part in rest, (
                    f"{page.name} shows {part!r}, but attnlib {command} prints\n"
                    f"{done.stdout}\n{done.stderr}"
                )
                rest = rest.split(part, 1)[1]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_options_of_shown_commands_exist(page: Path) -> None:
    """`attnlib COMMAND ...` in a block or in the text: the command, its options and choices."""
    known = parsers()
    shown = [
        line
        for language, body in _blocks(page)
        if language in ("bash", "console", "text")
        for line in re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )?attnlib (\S.*)$", body, re.M)
        if line.split()[0] in known and not line.startswith("parity on ")
    ]
    shown += re.findall(r"`attnlib ([a-z][^`]*)`", FENCE.sub("", page.read_text()))
    for line in shown:
        command, *arguments = shlex.split(line, comments=True)
        options = known[command]._option_string_actions
        for option, value in itertools.pairwise([*arguments, ""]):
            if option.startswith("--") and command != "run":  # its options are the program's
                assert option in options, f"{page.name}: attnlib {command} has no {option}"
                choices = options[option].choices
                assert choices is None or value in choices, f"{page.name}: {option} {value}"


_SILENT = {"ATTNLIB_PLUGINS": "0", "ATTNLIB_TUNING": "off"}


def _fresh() -> dict[str, str]:
    """The environment without variables of attnlib and Triton."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ATTNLIB_", "TRITON_INTERPRET"))
    } | _SILENT


def test_recorded_outputs_are_quotations() -> None:
    """A text block after a link to a result file shows lines of that file, in order."""
    readme = (ROOT / "README.md").read_text()
    found = re.findall(
        r"\]\((benchmarks/results/[^)]+\.txt)\)[^\n]*\n\n```text\n(.*?)^```$", readme, re.M | re.S
    )
    assert found
    for record, shown in found:
        recorded = (ROOT / record).read_text().splitlines()
        places = [recorded.index(line) for line in shown.splitlines() if line != "..."]
        assert places == sorted(places)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r'(?:\]\(|<img src=")([^)"#][^)"]*)[)"]', text):
        if "://" not in target:
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"


def test_pages_that_the_readme_links_are_readable_in_the_repository() -> None:
    """No references that only the site resolves: docstrings (`:::`) and snippets."""
    pages = re.findall(r"\]\(([^)#]+\.md)[)#]", (ROOT / "README.md").read_text())
    assert len(pages) > 20
    for page in pages:
        assert not re.search(r"^(:::|.*--8<--)", (ROOT / page).read_text(), re.M), page


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_names_of_the_package_exist(page: Path) -> None:
    """Dotted names below attnlib, paths, and names of source files."""
    text = page.read_text()
    for name in set(re.findall(r"\battnlib(?:\.\w+)+", text)):
        assert _exists(name.split(".")), f"{page.name} names {name}, which does not exist"
    for file in set(re.findall(r"`((?:attnlib|tests|benchmarks|examples)/[\w./-]+\.\w+)`", text)):
        assert (ROOT / file).exists(), f"{page.name} names {file}, which does not exist"
    for file in set(re.findall(r"`([\w/-]+\.(?:py|c|sh))`", text)):
        assert Path(file).name in _sources(), f"{page.name} names {file}, which does not exist"


@functools.cache
def _sources() -> set[str]:
    folders = ("attnlib", "tests", "benchmarks", "examples", "docs")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}


def _exists(names: list[str]) -> bool:
    """Whether the longest prefix that is a module has the rest as attributes."""
    for count in range(len(names), 0, -1):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(".".join(names[:count]))
            return not names[count:] or hasattr(found, names[count])
    return False


def test_the_navigation_lists_every_page() -> None:
    listed = re.findall(r"[\w/-]+\.md\b", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1])
    published = {"benchmarks.md", "changelog.md", "contributing.md"}
    published |= {"examples/kv-format.md", "examples/plugin.md"}
    assert sorted(listed) == sorted(
        {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | published
    )


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=_name)
def test_the_api_reference_names_objects_that_exist(page: Path) -> None:
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), f"{page.name}: {name}"


def test_the_api_index_lists_every_page() -> None:
    text = (DOCS / "api" / "index.md").read_text()
    listed = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", text, re.M)
    assert {*listed, "index.md"} == {page.name for page in (DOCS / "api").glob("*.md")}


def test_the_performance_page_lists_every_suite() -> None:
    (listed,) = re.findall(r"^Suites: (.+?)\.$", (DOCS / "performance.md").read_text(), re.M | re.S)
    assert set(re.findall(r"`(\w+)`", listed)) == SUITES.keys()


def test_the_serving_guide_states_the_limits_of_shared_prefixes() -> None:
    """In MiB: of separate launches, and of decodes in one kernel."""
    rule, mib = PrefixRule(), 2**20
    text = " ".join((DOCS / "guides/serving-engines.md").read_text().split())
    for least, added, unit in (
        (rule.min_saved_bytes, rule.min_saved_bytes_per_token, "query token"),
        (rule.min_saved_bytes_of_decodes, rule.min_saved_bytes_per_decode, "request"),
    ):
        assert f"{least / mib:g} MiB, plus {added / mib:g} MiB for each {unit}" in text


def test_no_page_says_that_models_with_served_states_are_refused() -> None:
    """Rows of models in the page of latent attention; `PagedModel` serves some with states."""
    rows = (DOCS / "guides/latent-attention.md").read_text().splitlines()
    refused = [row.lower() for row in rows if row.startswith("| ") and "refused" in row]
    assert len(refused) > 1
    for name in SERVED:
        assert not any(name.replace("_", " ") in row for row in refused), name


def test_the_messages_of_the_troubleshooting_page_exist() -> None:
    """A quoted message is in the source; `N`, `M`, `[r]`, `[j]` and `...` stand for values."""
    sources = "\n".join(path.read_text() for path in (ROOT / "attnlib").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # strings over several lines
    page = (DOCS / "troubleshooting.md").read_text()
    messages = [
        text
        for line in page.splitlines()
        if line.startswith("| ")
        for text in re.findall(r'"([^"]+)"', line.split(" | ")[0])
    ]
    assert len(messages) > 12
    for message in messages:
        for part in re.split(r"\bN\b|\bM\b|'NAME'|`?\[[rj]\]`?|\.\.\.", message):
            assert part.strip(" ,") in sources or "undefined symbol" in part, message


def test_the_first_screen_of_the_readme_is_short() -> None:
    """Purpose, two commands, twelve lines of code and a figure fit 30 lines of 100 characters."""
    screen = (ROOT / "README.md").read_text().splitlines()[:30]
    assert max(map(len, screen)) <= 100
    text = "\n".join(screen)
    blocks = [[line for line in body.splitlines() if line] for _, body in FENCE.findall(text)]
    assert [len(lines) for lines in blocks] == [2, 12]
    assert all(len(line) <= 95 for lines in blocks for line in lines)
    for needed in ("&& attnlib demo", "&& pytest", '<img src="benchmarks/results/'):
        assert needed in text


def test_generated_pages_are_as_generated() -> None:
    """The generated pages are what `python docs/generate.py` writes."""
    for name, text in generator("generate").pages().items():
        assert (ROOT / "docs" / name).read_text() == text, (
            f"docs/{name} is out of date: run python docs/generate.py"
        )


def test_architecture_names_what_is_there() -> None:
    """Every module that the page names exists; its package tree lists every module and package."""
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
    tree = next(
        body
        for language, body in _blocks(ROOT / "docs" / "architecture.md")
        if body.startswith("attnlib/")
    )
    modules = {
        path.name
        for path in package.iterdir()
        if path.suffix == ".py" and not path.name.startswith("__")
    }
    modules |= {
        f"{path.parent.name}/" for path in package.rglob("__init__.py") if path.parent != package
    }
    missing = {name for name in modules if not re.search(rf"(?<![\w]){re.escape(name)}", tree)}
    assert not missing, f"the tree of docs/architecture.md lacks {sorted(missing)}"


def test_architecture_lists_the_import_layers() -> None:
    page = (DOCS / "architecture.md").read_text().split("## Import layers")[1]
    block = FENCE.search(page)
    assert block is not None
    assert tuple(tuple(line.split(", ")) for line in block[2].splitlines()) == LAYERS


def test_the_check_of_shown_output_can_fail() -> None:
    assert _same("ran in 1.0 s, logit error 1.0e-06", "ran in 22 s, logit error 2.3e-07")
    assert _same("9 cases · 5 passed · 0 failed", "12 cases · 8 passed · 0 failed")
    assert not _same("9 cases · 5 passed · 0 failed", "9 cases · 5 passed · 1 failed")
    assert not _same("3 pass", "4 pass") and not _same("logit error 1.0e-06", "logit error inf")
