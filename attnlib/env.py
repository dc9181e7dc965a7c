"""Every environment variable that attnlib reads, in one table.

Variables are read when they are needed, never at import, so that tests and notebooks can change
them at any time. An empty value means the default. A value that does not parse raises: ignoring a
setting silently would be worse. `docs/environment.md` is generated from this table.
"""

from __future__ import annotations

import difflib
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
    "raw",
    "raw_reader",
    "read",
    "unknown_variables",
    "warn_about_unread_variables",
]


@dataclass(frozen=True)
class EnvironmentVariable:
    """One variable.

    Attributes:
        name: the variable.
        default: its default value as text.
        values: the values it takes, in Markdown.
        purpose: what it does, in Markdown.
        parse: text -> value; raises ValueError.
    """

    name: str
    default: str
    values: str
    purpose: str
    parse: Callable[[str], Any]


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        name = value.strip().upper()
        if name and name not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return name

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
            "NAME, `prefill:NAME,decode:NAME`, `prefix:NAME,suffix:NAME`, `-NAME[,-NAME]`, or "
            "`auto`",
            "Selects the attention backend. NAME is registered, or `module:Class`, or "
            "`path/to/file.py:Class`. It is never replaced by another backend, and raises "
            "`UnknownBackendError` if there is none; a leading `-` excludes a backend from auto.",
            str.strip,
        ),
        EnvironmentVariable(
            "ATTNLIB_KV_CACHE_LAYOUT",
            "",
            ", ".join(f"`{name}`" for name in _LAYOUTS),
            "Memory layout of every cache that is allocated without an explicit layout.",
            _one_of(*_LAYOUTS),
        ),
        EnvironmentVariable(
            "ATTNLIB_VALIDATE",
            "0",
            "`0`, `1`, `2`",
            "1 checks every step against the P- and M-rules and names the violation (it copies "
            "metadata to the host: not for production). 2 also runs each call on the torch backend "
            "and writes a case for `attnlib replay` if the results differ.",
            _level,
        ),
        EnvironmentVariable(
            "ATTNLIB_DUMP_DIR",
            "attnlib-cases",
            "a directory",
            "Where ATTNLIB_VALIDATE=2 and `attnlib.debug.shadow` write cases for `attnlib replay`.",
            str.strip,
        ),
        EnvironmentVariable(
            "ATTNLIB_PLUGINS",
            "1",
            "`0`, `1`",
            "0 ignores backends of installed packages (entry-point group `attnlib.backends`).",
            _switch,
        ),
        EnvironmentVariable(
            "ATTNLIB_TUNING",
            "",
            "a file, or `off`",
            "The tuning table, written by `attnlib tune`, that auto and the tiles of the triton "
            "backend follow. Default: `~/.cache/attnlib/tuning/CHIP.json` if it exists. `off` "
            "ignores all tuning tables.",
            str.strip,
        ),
        EnvironmentVariable(
            "ATTNLIB_KERNELS",
            "",
            "a folder",
            "Kernels of `attnlib compile --out`, which Triton's cache gets at the first launch. A "
            "warning says why if they do not fit the installation.",
            str.strip,
        ),
        EnvironmentVariable(
            "ATTNLIB_VLLM_STATES", "0", "`0`, `1`", "1 computes state layers of vLLM, too.", _switch
        ),
    )
}

FOREIGN_VARIABLES: tuple[str, ...] = (
    "VLLM_ATTENTION_BACKEND",
    "SGLANG_ATTENTION_BACKEND",
    "VLLM_KV_CACHE_LAYOUT",
)
"""Variables of other systems that attnlib does not read; it warns once if one is set."""

_warned: set[str] = set()
_MAX_PARSED = 256
_parsed: dict[tuple[str, Any], Any] = {}
"""(variable, its text in the environment) -> parsed value; cleared when it is full."""


def read(name: str) -> Any:
    """The parsed value of one of the variables above.

    Raises:
        EnvironmentVariableError: the value does not parse; the message lists the values that do.
    """
    environment: Any = os.environ
    try:
        return _parsed[name, environment._data.get(_KEYS[name])]  # as `raw`, without its call
    except (AttributeError, KeyError):
        key = (name, raw(name))
    if key not in _parsed:
        if len(_parsed) >= _MAX_PARSED:
            _parsed.clear()
        _parsed[key] = _parse(ENVIRONMENT[name])
    return _parsed[key]


def raw(name: str) -> object:
    """The value of any variable as `os.environ` stores it; None if it is not set.

    `os.environ.get` takes microseconds for a variable that is not set, and layers read variables
    in each call.
    """
    environment: Any = os.environ
    try:
        return environment._data.get(_KEYS[name])
    except (AttributeError, KeyError):  # another mapping as `os.environ`, or another variable
        return environment.get(name)


def raw_reader(*names: str) -> Callable[[], tuple[object, ...]]:
    """A function that returns `raw` of variables of this table, or TRITON_INTERPRET, for code that
    compares them in each call."""
    keys = tuple(_KEYS[name] for name in names)

    def read_all() -> tuple[object, ...]:
        environment: Any = os.environ
        try:
            return tuple(map(environment._data.get, keys))
        except AttributeError:  # another mapping as `os.environ`
            return tuple(map(environment.get, names))

    return read_all


def _parse(variable: EnvironmentVariable) -> Any:
    text = os.environ.get(variable.name, "").strip() or variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise EnvironmentVariableError(
            f"{variable.name}={text!r} is not valid: {error}. Unset it or set one of: "
            f"{variable.values}."
        ) from None


def _encode(name: str) -> object:
    encode = getattr(os.environ, "encodekey", None)
    return name if encode is None else encode(name)


_KEYS: Mapping[str, object] = {name: _encode(name) for name in (*ENVIRONMENT, "TRITON_INTERPRET")}


def unknown_variables() -> dict[str, str]:
    """The variables of the environment that begin with ATTNLIB_ and are not in the table, each
    with the most similar name of the table, or ""."""
    found = {}
    # All begin alike, which would make every name similar to some other.
    known = {one.removeprefix("ATTNLIB_"): one for one in ENVIRONMENT}
    for name in sorted(os.environ):
        if name.upper().startswith("ATTNLIB_") and name not in ENVIRONMENT:
            own = name.upper().removeprefix("ATTNLIB_")
            nearest = difflib.get_close_matches(own, known, n=1)
            found[name] = known[nearest[0]] if nearest else ""
    return found


def warn_about_unread_variables() -> None:
    """Warn once for each variable that is set and that attnlib does not read: those in
    `FOREIGN_VARIABLES`, and unknown ones that begin with ATTNLIB_."""
    for name in FOREIGN_VARIABLES:
        if name in os.environ:
            ours = "ATTNLIB_KV_CACHE_LAYOUT" if "LAYOUT" in name else "ATTNLIB_BACKEND"
            _warn_once(name, f"it reads {ours}.")
    for name, nearest in unknown_variables().items():
        hint = f"did you mean {nearest}?" if nearest else f"it reads {', '.join(ENVIRONMENT)}."
        _warn_once(name, hint)


def _warn_once(name: str, hint: str) -> None:
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name}={os.environ[name]!r} is set, but attnlib does not read it; {hint}",
            stacklevel=4,
        )
