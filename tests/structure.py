"""Figures of the structure of the code and of the documentation.

    python -m tests.structure            # print the figures beside their limits
    python -m tests.structure --update   # lower the limits to the figures

`tests/test_structure.py` fails when a figure is worse than its limit in `structure_limits.json`.
`--update` never raises a limit: edit the file for that, and give the reason in the commit.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIMITS = Path(__file__).with_name("structure_limits.json")
MOST_LINES = 250
MOST_PARAMETERS = 40
MOST_DEVICE_LINES = 120
MOST_HOST_LINES = 60
STATE_FILES = (
    "**/state_*.py", "**/states.py", "**/states/*.py", "backends/fla/*.py",
    "backends/flashinfer/gdn.py", "backends/_foreign/packed_*.py", "cache/hybrid_states.py",
    "integrations/transformers/mixer_*.py", "ops/triton/kernels/decode_loads.py",
    "ops/triton/kernels/fused_step.py", "ops/triton/kernels/short_convolution.py",
    "ops/triton/kernels/step_parts.py", "ops/triton/kernels/stored_state.py",
    "ops/triton/kernels/token_rows.py", "ops/triton/hopper/kernels/fused_*.py",
)  # fmt: skip
"""Files of the package for state layers; those of `testing` are not counted, nor is one of
`metadata` about the state of CUDA graphs."""


class Function(NamedTuple):
    """A function of the package.

    Attributes:
        name: its name.
        path: the file, below the package.
        parameters: positional and keyword-only ones, `self` included.
        lines: from `def` to the end.
        is_device: compiled by Triton.
        is_entry: launched from the host.
    """

    name: str
    path: str
    parameters: int
    lines: int
    is_device: bool
    is_entry: bool


def package_files() -> list[Path]:
    """The Python files of the package."""
    return sorted((ROOT / "attnlib").rglob("*.py"))


def functions() -> Iterator[Function]:
    """All functions and methods of the package."""
    for path in package_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            is_device = any(name.split("(")[0].endswith(".jit") for name in decorators)
            yield Function(
                node.name,
                str(path.relative_to(ROOT / "attnlib")),
                count,
                node.end_lineno - node.lineno + 1,
                is_device,
                is_device and node.name.endswith("_kernel"),
            )


def state_files() -> list[Path]:
    """The files of state layers (`STATE_FILES`)."""
    package = ROOT / "attnlib"
    found = {path for pattern in STATE_FILES for path in package.glob(pattern)}
    found.discard(package / "metadata" / "state_checks.py")
    return sorted(path for path in found if "testing" not in path.parts)


def code_lines(source: str) -> int:
    """Lines with code: neither empty nor of a comment or a docstring."""
    skipped = (COMMENT, NL, NEWLINE, INDENT, DEDENT, ENDMARKER)
    code: set[int] = set()
    for token in generate_tokens(StringIO(source).readline):
        if token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            code.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code)


def document_files() -> list[Path]:
    """The pages of the site and the documents beside it."""
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
    return [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in names)]


def figures() -> dict[str, float]:
    """The figures by name. Smaller is better for all but those that begin with "share"."""
    files = package_files()
    found = list(functions())
    device = [function for function in found if function.is_device]
    inner = [function for function in device if not function.is_entry]
    sources = {path: path.read_text() for path in files}
    lines = {path: text.count("\n") for path, text in sources.items()}
    glue = [path for path in files if "kernels" not in path.parts]
    package = "".join(text for path, text in sources.items())
    return {
        "device functions with more than 40 parameters": sum(
            function.parameters > MOST_PARAMETERS for function in device
        ),
        "most parameters of a device function": max(f.parameters for f in device),
        "device functions over 120 lines besides entry kernels": sum(
            function.lines > MOST_DEVICE_LINES for function in inner
        ),
        "lines of the longest device function besides entry kernels": max(f.lines for f in inner),
        "host functions over 60 lines": sum(
            function.lines > MOST_HOST_LINES for function in found if not function.is_device
        ),
        "fmt: skip": package.count("fmt: skip"),
        "metadata: Any and getattr(metadata, ...)": package.count("metadata: Any")
        + package.count("getattr(metadata"),
        "share of files with at most 250 lines, in percent": _share(files, lines),
        "share of files with at most 250 lines without kernels, in percent": _share(glue, lines),
        "lines of code of state layers without their suite": sum(
            code_lines(sources[path]) for path in state_files()
        ),
        "words of the documentation": sum(
            len(path.read_text().split()) for path in document_files()
        ),
    }


def _share(files: list[Path], lines: dict[Path, int]) -> float:
    short = sum(lines[path] <= MOST_LINES for path in files)
    return round(100 * short / len(files), 1)


def is_worse(name: str, figure: float, limit: float) -> bool:
    """Whether a figure breaks its limit."""
    return figure < limit if name.startswith("share") else figure > limit


def main() -> None:
    """Print the figures, or lower the limits to them."""
    limits: dict[str, float] = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    now = figures()
    if "--update" in sys.argv:
        kept = {
            name: limits[name]
            if name in limits and is_worse(name, figure, limits[name])
            else figure
            for name, figure in now.items()
        }
        LIMITS.write_text(json.dumps(kept, indent=1) + "\n")
        return
    for name, figure in now.items():
        print(f"{name:70} {figure:8g}   limit {limits.get(name, float('nan')):g}")


if __name__ == "__main__":
    main()
