"""Aggregates: values with named fields that Gluon functions build, pass and return."""

from typing import NamedTuple

import pytest

gluon = pytest.importorskip("triton.experimental.gluon")

from triton.experimental.gluon import language as gl  # noqa: E402

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate  # noqa: E402


@aggregate
class Pair:
    """Two fields, of which one is a constant."""

    value: Value
    COUNT: gl.constexpr


def test_fields_are_taken_in_order_or_by_name() -> None:
    for pair in Pair(None, 3), Pair(None, COUNT=3), Pair(COUNT=3, value=None):
        assert pair.value.value is None
        assert pair.COUNT.value == 3


def test_tuples_become_values_and_keep_the_names_of_their_items() -> None:
    class Config(NamedTuple):
        CAUSAL: bool
        SCORE: object

    pair = Pair(Config(CAUSAL=True, SCORE=None), 1)
    assert pair.value.CAUSAL.value is True
    assert pair.value.SCORE.value is None
    assert Pair((1, (2, None)), 1).value[1][0].value == 2


@pytest.mark.parametrize(("args", "kwargs"), [((1,), {}), ((1, 2, 3), {}), ((1, 2), {"OTHER": 3})])
def test_missing_and_unknown_fields_are_refused(args: tuple, kwargs: dict) -> None:
    with pytest.raises(TypeError, match="Pair .*field"):
        Pair(*args, **kwargs)


def test_a_constant_is_not_a_value_of_another_kind() -> None:
    with pytest.raises(TypeError, match="COUNT"):
        Pair(None, (1, 2))
