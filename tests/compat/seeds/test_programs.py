"""Programs that use the names of one seed, with attnlib.compat in the import lines.

Each program runs on attnlib and, with the same import lines, on the originals. Its `result` must be
the same.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.compat.seeds import (
    attention_api_original,
    minivllm_original,
    paged_ops_original,
    triton_prefill_original,
    v1_utils_original,
)
from tests.compat.seeds.comparison import difference

FOLDER = Path(__file__).parent / "programs"
PROGRAMS = sorted(FOLDER.glob("*.py"))
ORIGINALS: dict[str, ModuleType] = {
    "attnlib.compat.minivllm": minivllm_original,
    "attnlib.compat.vllm": attention_api_original,
    "attnlib.compat.vllm.v1.attention.backends.utils": v1_utils_original,
    "attnlib.compat.vllm.ops.paged_attn": paged_ops_original,
    "attnlib.compat.vllm.v1.attention.ops.triton_prefill_attention": triton_prefill_original,
}
"""What takes the place of the modules that the programs import."""
OTHER_PACKAGES = ("dataclasses", "numpy", "torch", "types", "typing")


def imported(program: Path) -> set[str]:
    """The modules of a program's import lines."""
    found = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level
            found.add(node.module)
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_runs_as_on_the_original(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours: Any = runpy.run_path(str(program))["result"]
    output = capsys.readouterr().out
    assert output
    for module in imported(program) & set(ORIGINALS):
        monkeypatch.setitem(sys.modules, module, ORIGINALS[module])
    assert difference(ours, runpy.run_path(str(program))["result"]) is None
    assert capsys.readouterr().out == output


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_has_no_other_names_of_attnlib(program: Path) -> None:
    own = {name for name in imported(program) if name.split(".")[0] not in OTHER_PACKAGES}
    assert own and own <= set(ORIGINALS)
