"""Environment variables: read on use, parsed strictly, listed in one table."""

import os
import re
from pathlib import Path

import pytest
import torch

import attnlib
from attnlib import env
from attnlib.cli import main
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


def test_an_unknown_variable_causes_one_warning_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """D4: `ATTNLIB_BACKND=torch` is not ignored silently, in selection or in a command."""
    spec = attnlib.AttentionSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype=torch.float32)
    monkeypatch.setattr(env, "_warned", set())
    monkeypatch.setenv("ATTNLIB_BACKND", "torch")
    monkeypatch.setenv("ATTNLIB_COLOR_OF_PAGES", "1")
    with pytest.warns(UserWarning) as caught:
        attnlib.get_attn_backend(spec, device="cpu")
        attnlib.get_attn_backend(spec.replace(num_heads=4), device="cpu")
    backend, other = [str(one.message) for one in caught]
    assert "ATTNLIB_BACKND='torch' is set, but" in backend
    assert "did you mean ATTNLIB_BACKEND?" in backend
    assert "it reads ATTNLIB_BACKEND, ATTNLIB_KV_CACHE_LAYOUT, " in other
    env._warned.clear()
    with pytest.warns(UserWarning, match="did you mean ATTNLIB_BACKEND?"):
        assert main(["list", "--device", "cpu"]) == 0
    assert env.unknown_variables() == {
        "ATTNLIB_BACKND": "ATTNLIB_BACKEND",
        "ATTNLIB_COLOR_OF_PAGES": "",
    }
