"""docs/write-a-backend.md and docs/test-your-backend.md: code runs, and lists match the library."""

from __future__ import annotations

import ast
import inspect
import math
import re
from pathlib import Path

import pytest
import torch

import attnlib
from attnlib.capabilities import NOT_STATED, Capabilities
from attnlib.selection import unregister_backend
from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import run_conformance
from examples.one_file_backend import OneFileBackend
from tests.testing.toy_backend import TOY_CAPABILITIES, ToyBackend, toy_with
from tests.testing.wrong_backends import OffByOneWindow

DOCS = Path(__file__).parents[2] / "docs"
WRITE, TEST = "write-a-backend.md", "test-your-backend.md"
CLASSES = (
    attnlib.AttentionBackend,
    attnlib.AttentionImpl,
    attnlib.AttentionMetadataBuilder,
)
CALLED_BY_ENGINES = {
    "AttentionBackend.validate_configuration",
    "AttentionBackend.make_metadata",
    "AttentionBackend.make_builder",
    "AttentionBackend.full_cls_name",
    "AttentionImpl.attention_params",
    "AttentionImpl.of_call",
    "AttentionImpl.read_per_head_tensors_from",
    "AttentionMetadataBuilder.with_host_lengths",
}
"""Public methods that a backend calls or inherits and does not override."""


def _text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def _python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", _text(name), re.DOTALL)


def _table_after(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading of the guide, without its header."""
    section = _text(WRITE).split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_every_check_is_in_the_table_and_nothing_else() -> None:
    table = re.findall(r"^\| ([A-Z]+\d+(?:, [A-Z]+\d+)*) \|", _text(TEST), re.MULTILINE)
    listed = {check for cell in table for check in cell.split(", ")}
    assert listed == {check.id for check in CHECKS}


def test_the_case_in_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in _python_blocks(TEST) if "Case(" in block]
    exec(block, {"MyBackend": ToyBackend})
    assert capsys.readouterr().out == "within budget\n"


def test_the_failure_in_the_guide_is_real() -> None:
    backend = toy_with(OffByOneWindow)
    report = run_conformance(
        backend, device="cpu", only="W2/window-2-decode", against=[], label="my_backend"
    )
    shown = re.search(r"```text\n(FAIL .*?)```", _text(TEST), re.DOTALL)
    assert shown is not None
    assert shown[1] in f"{report}\n"


def test_the_suite_class_in_the_guide_is_a_suite() -> None:
    (block,) = [block for block in _python_blocks(TEST) if "BackendConformance" in block]
    names: dict[str, type] = {}
    exec(block, names)
    assert names["TestMyBackend"].__mro__[1].__name__ == "BackendConformance"


def test_the_guide_lists_every_capability_once() -> None:
    listed = [
        row[0]
        for heading in ("### Required", "### Required for some layers", "### Optional")
        for row in _table_after(heading)
    ]
    assert sorted(listed) == sorted(Capabilities.__dataclass_fields__)


def test_the_required_capabilities_are_the_ones_without_which_no_layer_works() -> None:
    """A plain layer is rejected without any one of them, and accepted with only these."""
    spec = attnlib.AttentionSpec(num_heads=4, head_size=64, dtype=torch.float32)
    required = [row[0] for row in _table_after("### Required")]
    stated = {name: getattr(TOY_CAPABILITIES, name) for name in required}
    for name in Capabilities.__dataclass_fields__:
        backend = toy_with(**{name: NOT_STATED})
        reasons = backend.validate_configuration(spec, "cpu")
        expected = [f"{name}: not stated by this backend, so not assumed"]
        assert reasons == (expected if name in required else []), name

    class Plain(ToyBackend):
        capabilities = Capabilities(**stated)

    assert Plain.validate_configuration(spec, "cpu") == []


def test_capabilities_that_some_layers_need_have_no_default() -> None:
    for row in _table_after("### Required for some layers"):
        assert getattr(Capabilities(), row[0]) is NOT_STATED, row[0]
    for name, default, _ in _table_after("### Optional"):
        expected = -math.inf if default == "-inf" else ast.literal_eval(default)
        assert getattr(Capabilities(), name) == expected, name


def test_the_guide_lists_the_required_methods_and_the_reference_describes_all() -> None:
    rows = {row[0]: row[1] for row in _table_after("## Methods") if "." in row[0]}
    methods = {
        f"{cls.__name__}.{name}": member
        for cls in CLASSES
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, (staticmethod, classmethod)))
    }
    hooks = set(methods) - CALLED_BY_ENGINES
    assert set(rows) < hooks
    required = {name for name, text in rows.items() if text.startswith("required")}
    abstract = {f"{cls.__name__}.{name}" for cls in CLASSES for name in cls.__abstractmethods__}
    assert required == abstract & hooks
    assert [name for name, member in methods.items() if not member.__doc__] == []


def test_the_guide_lists_the_builder_attributes_with_their_defaults() -> None:
    rows = {row[0]: row[1] for row in _table_after("## Methods") if "." not in row[0]}
    builder = attnlib.AttentionMetadataBuilder
    defaults = {
        "cudagraph_support": builder.cudagraph_support.name,
        "reorder_batch_threshold": str(builder.reorder_batch_threshold),
        "needs_host_lengths": str(builder.needs_host_lengths),
    }
    assert rows == defaults


def test_the_declaration_in_the_guide_is_accepted() -> None:
    (block,) = [block for block in _python_blocks(WRITE) if block.startswith("capabilities =")]
    names = {"torch": torch, **{name: getattr(attnlib, name) for name in attnlib.__all__}}
    exec(block, names)
    backend = toy_with(**names["capabilities"].stated())
    spec = attnlib.AttentionSpec(num_heads=4, head_size=64, dtype=torch.float16)
    device = attnlib.device.DeviceInfo(type="cuda", capability=(9, 0))
    assert backend.validate_configuration(spec, device) == []


def test_the_registrations_in_the_guide_work() -> None:
    (block,) = [block for block in _python_blocks(WRITE) if "register_backend(" in block]
    for statement in ast.parse(block).body:
        exec(ast.unparse(statement), {"attnlib": attnlib, "MyBackend": ToyBackend})
        try:
            assert "my_backend" in attnlib.list_backends()
        finally:
            unregister_backend("my_backend")


def test_the_smallest_backend_has_at_most_40_lines() -> None:
    path = DOCS.parent / "examples" / "one_file_backend.py"
    code = path.read_text(encoding="utf-8")
    num_lines = len(code.splitlines())
    assert num_lines <= 40
    assert f"{num_lines} lines" in _text(WRITE)
    assert _python_blocks(WRITE)[0] == code


def test_the_smallest_backend_declares_only_what_the_suite_needs() -> None:
    """The required capabilities, and the layout that the conformance suite names."""
    required = {row[0] for row in _table_after("### Required")} | {"kv_cache_layouts"}
    defaults = Capabilities().stated()
    stated = OneFileBackend.capabilities.stated()
    assert {name for name in stated if stated[name] != defaults.get(name, NOT_STATED)} == required


@pytest.mark.parametrize("name", [WRITE, TEST])
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", _text(name)):
        assert (DOCS / target).resolve().exists(), target
