"""The mutants of `tests.testing.mutation`: one change each, none in texts and annotations."""

from __future__ import annotations

import ast

from tests.testing.mutation import mutants_of

SOURCE = '''
def f(x: Literal[3], flag=True):
    """Two."""
    if x < 2 and not flag:
        raise ValueError(f"{x + 1}")
    return g.h(x, 4 - x)
'''


def test_each_mutant_has_one_change() -> None:
    found = {mutant.change for mutant in mutants_of(SOURCE)}
    assert found == {
        "other boolean: True -> False",
        "and/or: x < 2 and (not flag) -> x < 2 or not flag",
        "comparison: x < 2 -> x <= 2",
        "constant + 1: 2 -> 3",
        "dropped sign or not: not flag -> flag",
        "swapped arguments: g.h(x, 4 - x) -> g.h(4 - x, x)",
        "constant + 1: 4 -> 5",
        "operator: 4 - x -> 4 + x",
    }


def test_mutants_differ_from_the_source_and_from_each_other() -> None:
    sources = [mutant.source for mutant in mutants_of(SOURCE)]
    assert len({*sources, ast.unparse(ast.parse(SOURCE))}) == len(sources) + 1
