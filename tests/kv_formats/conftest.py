"""The format of the example package, registered by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlib.kv_formats import KVFormat, register_kv_format, registry, unregister_kv_format
from attnlib.object_path import load_object

EXAMPLE = Path(__file__).parents[2] / "examples" / "attnlib-kv-format-example"
MODULE = EXAMPLE / "src" / "attnlib_kv_format_example" / "rotated4.py"


@pytest.fixture(autouse=True)
def no_installed_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of the environment, such as the installed example, take no part."""
    monkeypatch.setattr(registry, "entry_points", lambda group: [])


@pytest.fixture
def rotated4() -> Iterator[KVFormat]:
    """ "example:rotated4"."""
    stored = register_kv_format(load_object(f"{MODULE}:ROTATED_4BIT"))
    yield stored
    unregister_kv_format(stored.name)
