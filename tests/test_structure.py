"""The structure of the code and the length of the documentation may only improve."""

from __future__ import annotations

import json

import pytest

from tests.structure import LIMITS, figures, is_worse

FIGURES = figures()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_keeps_its_limit(name: str) -> None:
    """`python -m tests.structure` prints all figures."""
    limit = json.loads(LIMITS.read_text())[name]
    assert not is_worse(name, FIGURES[name], limit), (
        f"{name}: {FIGURES[name]:g}, and the limit is {limit:g}. Shorten what you added, or, with "
        f"the reason in the commit, edit {LIMITS.name}. `python -m tests.structure --update` "
        f"lowers the limits after an improvement."
    )


def test_limits_have_figures() -> None:
    """No limit is left behind when a figure goes."""
    assert json.loads(LIMITS.read_text()).keys() == FIGURES.keys()
