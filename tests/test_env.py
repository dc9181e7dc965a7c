"""Environment variables: read on use, parsed strictly, listed in one table."""

import os
import re
from pathlib import Path

import pytest

from attnlib import env
from attnlib.errors import EnvironmentVariableError


@pytest.mark.parametrize(
    ("name", "value"),
    [("ATTNLIB_VALIDATE", "yes"), ("ATTNLIB_PLUGINS", "true"), ("ATTNLIB_KV_CACHE_LAYOUT", "BNHD")],
)
def test_a_value_that_does_not_parse_raises(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentVariableError, match=f"{name}='{value}' is not valid: expected"):
        env.read(name)


def test_defaults_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert (
        env.read("ATTNLIB_BACKEND") == "auto"
        and env.read("ATTNLIB_VALIDATE") == 0
        and env.read("ATTNLIB_PLUGINS") is True
    )


def test_a_variable_may_change_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed values are cached by text: a change applies at the next call, an error repeats."""
    monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)
    for value, level in (("1", 1), ("2", 2), ("1", 1), ("0", 0)):
        monkeypatch.setenv("ATTNLIB_VALIDATE", value)
        assert env.read("ATTNLIB_VALIDATE") == level
    monkeypatch.setenv("ATTNLIB_VALIDATE", "3")
    for _ in range(2):
        with pytest.raises(EnvironmentVariableError, match="ATTNLIB_VALIDATE='3'"):
            env.read("ATTNLIB_VALIDATE")
    os.environ.update(ATTNLIB_VALIDATE="2")
    assert env.read("ATTNLIB_VALIDATE") == 2
    monkeypatch.delenv("ATTNLIB_VALIDATE")
    assert env.read("ATTNLIB_VALIDATE") == 0
    monkeypatch.setattr(
        os, "environ", {"ATTNLIB_VALIDATE": "1"}
    )  # replaced by a plain dict, as some tests do
    assert env.read("ATTNLIB_VALIDATE") == 1 and env.read("ATTNLIB_BACKEND") == "auto"


def test_every_variable_in_the_sources_is_in_the_table() -> None:
    """Every ATTNLIB_ name in the sources is in the table."""
    package = Path(env.__file__).parent
    named = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"\bATTNLIB_[A-Z_]+\b", path.read_text())
    }
    assert named <= set(env.ENVIRONMENT), named - set(env.ENVIRONMENT)


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_value_means_the_default(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D24: `ATTNLIB_VALIDATE=` in a shell switches validation off."""
    for name in env.ENVIRONMENT:
        monkeypatch.setenv(name, value)
    assert env.read("ATTNLIB_VALIDATE") == 0 and env.read("ATTNLIB_PLUGINS") is True
    assert env.read("ATTNLIB_BACKEND") == "auto" and env.read("ATTNLIB_TUNING") == ""
