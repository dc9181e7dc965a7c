"""The sweep of tiles of state kernels: choices, equal bits, and the shipped choice afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from attnlib.bench import state_case
from attnlib.bench.peaks import Peaks
from attnlib.bench.state_case import StateCase
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.state_tiles import TILES, StateChoice
from benchmarks.gpu import state_tiles as script


@pytest.mark.parametrize(
    ("name", "columns", "choice"),
    [
        ("64x8", 32, StateChoice(64, 8)),
        ("32x4:128", 32, StateChoice(32, 4, 128)),
        ("16C32x2:168/3", 16, StateChoice(32, 2, 168, 3)),
        ("32x4:168w", 32, StateChoice(32, 4, 168, is_whole=True)),
        ("32x4/2", 32, StateChoice(32, 4, num_stages=2)),
        ("R128x4:168+4", 32, StateChoice(128, 4, 168, group=4)),
        ("M64x2+4", 32, StateChoice(64, 2, group=4, copies=True)),
    ],
)
def test_names_of_choices(name: str, columns: int, choice: StateChoice) -> None:
    assert script.parse(name) == (columns, choice)
    with script.chosen(name):
        assert set(state_tiles.TILES.values()) == {choice}
        assert columns == state_tiles.MOST_COLUMNS
        assert state_tiles.LONG_CHUNK == 0
    assert state_tiles.TILES is TILES and state_tiles.MOST_COLUMNS == state_tiles.LONG_CHUNK == 32


@pytest.mark.parametrize("case", script.CASES.values(), ids=lambda case: case.name)
def test_a_smaller_case_has_the_same_kernels(case: StateCase) -> None:
    """Those of many requests are not those of one; chips of 132 multiprocessors."""
    (small,) = script.smaller([case])
    heads = state_case.MODELS[case.model]["num_heads"]
    fills = [one.num_reqs * heads >= 2 * 132 for one in (case, small)]
    assert fills[0] == fills[1]


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(ValueError, match="ROWSxWARPS"):
        script.parse("64")


@pytest.mark.parametrize(
    "work",
    ["decode", *(pytest.param(name, marks=pytest.mark.slow) for name in ("verify", "prefill"))],
)
def test_a_dry_run(monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """A small model through the interpreter: all choices give the bits of the shipped one."""
    small: dict[str, Any] = {"num_heads": 1, "key_size": 16, "value_size": 32, "qk_norm": True}
    monkeypatch.setattr(state_case, "MODELS", {"small": small})
    case = StateCase(model="small", work=work, num_reqs=1, query_len=1 if work == "decode" else 3)
    monkeypatch.setitem(script.CASES, case.name, case)
    monkeypatch.setattr(script, "peaks", lambda: Peaks(100.0, 100.0, 1.0, "none"))
    row = script.measure(case.name, ["16x1", "R32x2+2", "4x4"])
    found = row["choices"]
    assert list(found) == [script.SHIPPED, "16x1", "R32x2+2", "4x4"]
    assert found["16x1"]["equal"] and found["16x1"]["us"] > 0
    assert found["16x1"]["difference"] == found["16x1"]["states"] == 0
    other = found["R32x2+2"]
    assert other["difference"] < 0.01 and other["states"] < 1e-5
    assert "error" in found["4x4"] and row["fastest"] in found
