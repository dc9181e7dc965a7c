"""The table of features inside other engines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnlib.integrations.features import ENGINES, FEATURES, Feature, features_of

ROOT = Path(__file__).parents[2]
REASONS = "refused: ", "absent: ", "not run: ", "not compared: "


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: f"{row.engine} {row.name}")
def test_each_cell_is_a_test_or_has_a_reason(row: Feature) -> None:
    assert len(row.cells) == len(ENGINES[row.engine])
    assert not row.name.startswith("the same")  # `attnlib doctor` leaves rows out
    for cell in row.cells:
        if cell.startswith(REASONS):
            continue
        file, _, name = cell.partition("::")
        text = (ROOT / file).read_text()
        if file.endswith(".py"):
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), cell


def test_features_of_a_version() -> None:
    older, newer = (features_of("vllm", version) for version in ("0.26.0", "0.33"))
    assert older.keys() == newer.keys() and older != newer
    assert features_of("vllm", "0.3.0") == features_of("vllm", "0.330.0") == {}
