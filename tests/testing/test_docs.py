"""The two guides for plug-in authors: what they show runs, what they list exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from attnlib.capabilities import Capabilities
from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import run_conformance
from tests.testing.toy_backend import ToyBackend, toy_with
from tests.testing.wrong_backends import OffByOneWindow

DOCS = Path(__file__).parents[2] / "docs"


def _python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)


def test_every_probe_is_in_the_table_and_nothing_else() -> None:
    table = re.findall(
        r"^\| ([A-Z]\d(?:, [A-Z]\d)*) \|", (DOCS / "test-your-backend.md").read_text(), re.MULTILINE
    )
    listed = {probe for cell in table for probe in cell.split(", ")}
    assert listed == {probe.id for probe in CHECKS}


def test_the_case_built_by_hand_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in _python_blocks("test-your-backend.md") if "Case(" in block]
    exec(block, {"MyBackend": ToyBackend})
    assert capsys.readouterr().out == "within budget\n"


def test_the_failure_shown_is_a_real_one() -> None:
    backend = toy_with(OffByOneWindow)
    report = run_conformance(
        backend, device="cpu", only="W2/window-2-decode", against=[], label="my_backend"
    )
    shown = re.search(
        r"```text\n(FAIL .*?)```", (DOCS / "test-your-backend.md").read_text(), re.DOTALL
    )
    assert shown is not None
    assert shown[1] in f"{report}\n"


def test_the_suite_class_of_the_guide_is_a_suite() -> None:
    (block,) = [
        block for block in _python_blocks("test-your-backend.md") if "BackendConformance" in block
    ]
    names: dict[str, type] = {}
    exec(block, names)
    assert names["TestMyBackend"].__mro__[1].__name__ == "BackendConformance"


def test_the_declaration_uses_fields_that_exist() -> None:
    (block,) = [block for block in _python_blocks("write-a-backend.md") if "Capabilities(" in block]
    names = set(re.findall(r"^    (\w+)=", block, re.MULTILINE))
    assert names
    assert names <= set(Capabilities.__dataclass_fields__)
    from attnlib.capabilities import Sizes

    exec(
        block.replace("    ...\n", ""),
        {"Capabilities": Capabilities, "Sizes": Sizes, "torch": torch},
    )


def test_the_registrations_of_the_guide_work() -> None:
    import attnlib

    (block,) = [
        block for block in _python_blocks("write-a-backend.md") if "register_backend(" in block
    ]
    for statement in ast.parse(block).body:
        exec(ast.unparse(statement), {"attnlib": attnlib, "MyBackend": ToyBackend})
        try:
            assert "my_backend" in attnlib.list_backends()
        finally:
            attnlib.unregister_backend("my_backend")


@pytest.mark.parametrize("name", ["write-a-backend.md", "test-your-backend.md"])
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / name).read_text()):
        assert (DOCS / target).resolve().exists(), target
