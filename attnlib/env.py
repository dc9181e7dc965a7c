"""Every environment variable that attnlib reads, in one table.

Variables are read when they are needed, never at import, so a test or a notebook can change them at any time. A value that does not parse
raises: a setting that is silently ignored is worse than none. `docs/environment.md` is generated from this table.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attnlib.errors import EnvironmentVariableError

__all__ = [
    "ENVIRONMENT",
    "FOREIGN_VARIABLES",
    "EnvironmentVariable",
    "read",
    "warn_about_foreign_variables",
]


@dataclass(frozen=True)
class EnvironmentVariable:
    """One variable: its name, its default as text, what values it takes and what it does."""

    name: str
    default: str
    values: str
    purpose: str
    parse: Callable[[str], Any]


def _text(value: str) -> str:
    return value.strip()


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        word = value.strip().upper()
        if word and word not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return word

    return parse


def _level(value: str) -> int:
    if value.strip() not in ("0", "1", "2"):
        raise ValueError("expected 0, 1 or 2")
    return int(value)


def _switch(value: str) -> bool:
    if value.strip() not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return value.strip() == "1"


_LAYOUTS = ("NHD", "HND", "NHD_INTERLEAVED", "HND_INTERLEAVED", "NHD_PACKED", "HND_PACKED")

ENVIRONMENT: Mapping[str, EnvironmentVariable] = {
    variable.name: variable
    for variable in (
        EnvironmentVariable(
            "ATTNLIB_BACKEND",
            "auto",
            "a name, `prefill:NAME,decode:NAME`, `-NAME[,-NAME]`, or `auto`",
            "Chooses the attention backend. A name insists and never falls back; a leading `-` removes a candidate from auto.",
            _text,
        ),
        EnvironmentVariable(
            "ATTNLIB_KV_CACHE_LAYOUT",
            "",
            ", ".join(f"`{name}`" for name in _LAYOUTS),
            "Overrides the order in memory of every cache allocated without an explicit layout.",
            _one_of(*_LAYOUTS),
        ),
        EnvironmentVariable(
            "ATTNLIB_VALIDATE",
            "0",
            "`0`, `1`, `2`",
            "1 checks every step against the P- and M-rules and names the offender (it copies metadata to the host: not for production). "
            "2 also reruns each call on the torch backend and writes a replayable case when they differ.",
            _level,
        ),
        EnvironmentVariable(
            "ATTNLIB_DUMP_DIR",
            "attnlib-cases",
            "a folder",
            "Where ATTNLIB_VALIDATE=2 and `attnlib.shadow` write replayable cases.",
            _text,
        ),
        EnvironmentVariable(
            "ATTNLIB_PLUGINS",
            "1",
            "`0`, `1`",
            "0 ignores backends offered by installed packages through the entry-point group `attnlib.backends`.",
            _switch,
        ),
        EnvironmentVariable(
            "ATTNLIB_TUNING",
            "",
            "a file, or `off`",
            "The tuning table that auto and the triton backend's tiles follow, as `attnlib tune` writes it; not set, it is "
            "`~/.cache/attnlib/tuning/CHIP.json` where that exists. `off` ignores all tuning tables.",
            _text,
        ),
    )
}

FOREIGN_VARIABLES: tuple[str, ...] = (
    "VLLM_ATTENTION_BACKEND",
    "SGLANG_ATTENTION_BACKEND",
    "VLLM_KV_CACHE_LAYOUT",
)
"""Variables of other systems that users set and expect to be read; attnlib reads none of them and says so once."""

_warned: set[str] = set()
_parsed: dict[tuple[str, Any], Any] = {}
"""What a variable's text, as the environment keeps it, was read as."""


def read(name: str) -> Any:
    """The parsed value of one of attnlib's own variables.

    Raises:
        EnvironmentVariableError: the value does not parse; the message names the variable, the value and what it takes.
    """
    seen = (name, _kept(name))
    try:
        return _parsed[seen]
    except KeyError:
        value = _parsed[seen] = _parse(ENVIRONMENT[name])
        return value


def _kept(name: str) -> object:
    """The variable as `os.environ` keeps it: asking that for one that is not set raises and catches, and layers ask at every call."""
    kept = getattr(os.environ, "_data", None)
    return os.environ.get(name) if kept is None else kept.get(_KEYS[name])


def _parse(variable: EnvironmentVariable) -> Any:
    raw = os.environ.get(variable.name, variable.default)
    try:
        return variable.parse(raw)
    except ValueError as error:
        raise EnvironmentVariableError(
            f"{variable.name}={raw!r} is not understood: {error}. Unset it or set one of: {variable.values}."
        ) from None


def _encoded(name: str) -> object:
    encode = getattr(os.environ, "encodekey", None)
    return name if encode is None else encode(name)


_KEYS: Mapping[str, object] = {name: _encoded(name) for name in ENVIRONMENT}


def warn_about_foreign_variables() -> None:
    """Warn once for each variable of another system that is set here and read by nobody."""
    for name in FOREIGN_VARIABLES:
        if name in os.environ and name not in _warned:
            _warned.add(name)
            ours = "ATTNLIB_KV_CACHE_LAYOUT" if "LAYOUT" in name else "ATTNLIB_BACKEND"
            warnings.warn(
                f"{name}={os.environ[name]!r} is set, but attnlib does not read it; it reads {ours}.",
                stacklevel=3,
            )
