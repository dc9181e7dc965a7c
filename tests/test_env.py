"""Variables are read late, parsed strictly, and all in one table."""

import re
from pathlib import Path

import pytest

from attnlib import env
from attnlib.errors import EnvironmentVariableError


@pytest.mark.parametrize(("name", "value"), [("ATTNLIB_VALIDATE", "yes"), ("ATTNLIB_PLUGINS", "true"), ("ATTNLIB_KV_CACHE_LAYOUT", "BNHD")])
def test_a_value_that_does_not_parse_raises(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentVariableError, match=f"{name}='{value}' is not understood: expected"):
        env.read(name)


def test_defaults_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert env.read("ATTNLIB_BACKEND") == "auto" and env.read("ATTNLIB_VALIDATE") == 0 and env.read("ATTNLIB_PLUGINS") is True


def test_the_environment_is_read_in_one_place() -> None:
    """Every ATTNLIB_ name in the sources is in the table; only selection's cache key looks at one raw."""
    package = Path(env.__file__).parent
    named = {name for path in package.rglob("*.py") for name in re.findall(r"\bATTNLIB_[A-Z_]+\b", path.read_text())}
    assert named <= set(env.ENVIRONMENT), named - set(env.ENVIRONMENT)
