"""What the user asks for: by argument, `use_backend` or ATTNLIB_BACKEND, in one syntax."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from attnlib.backends.base import AttentionBackend
from attnlib.backends.cascade import make_cascade
from attnlib.backends.composite import make_composite
from attnlib.env import ENVIRONMENT
from attnlib.errors import AttnlibError, EnvironmentVariableError, UnknownBackendError

__all__ = [
    "AUTO",
    "PAIR_SYNTAX",
    "ROLES",
    "Request",
    "has_role",
    "is_path",
    "parse_request",
    "unknown_backend_error",
]

Backend = type[AttentionBackend]


@dataclass(frozen=True)
class Request:
    """Which backend the user asks for.

    Attributes:
        source: where it comes from: "argument", "use_backend", "ATTNLIB_BACKEND" or "default".
        first, second: names of the requested backends, equal for a single one; None for auto.
        roles: what a pair uses them for, a key of `PAIRS`; None for a single backend or auto.
        excluded: names that auto must skip, without importing them.
    """

    source: str
    first: str | None = None
    second: str | None = None
    roles: tuple[str, str] | None = None
    excluded: frozenset[str] = frozenset()

    @property
    def is_auto(self) -> bool:
        """True if no backend is requested."""
        return self.first is None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the requested backends, the pair's own name first; empty for auto."""
        return () if self.is_auto else (self.text, str(self.first), str(self.second))

    @property
    def text(self) -> str:
        """The request in the syntax of ATTNLIB_BACKEND."""
        if self.is_auto:
            return ",".join(["auto", *(f"-{name}" for name in sorted(self.excluded))])
        if self.roles is None:
            return str(self.first)
        return f"{self.roles[0]}:{self.first},{self.roles[1]}:{self.second}"

    def combine(self, first: Backend, second: Backend) -> Backend:
        """The backend of the request, from the two named ones.

        Raises:
            LayoutMismatchError: the two backends of a pair read no common cache layout.
        """
        return first if self.roles is None else PAIRS[self.roles](first, second)


AUTO = Request("default")

PAIRS: dict[tuple[str, str], Callable[[Backend, Backend], Backend]] = {
    ("prefill", "decode"): make_composite,
    ("prefix", "suffix"): make_cascade,
}
"""How two backends serve one layer, by the names of their roles."""
ROLES = tuple(role for pair in PAIRS for role in pair)
PAIR_SYNTAX = ", ".join(f"'{first}:NAME,{second}:NAME'" for first, second in PAIRS)
_EXCLUDED, _AUTO, _ALONE = "-", "auto", ""


def parse_request(text: str, source: str, known: Iterable[str]) -> Request:
    """Parse `NAME`, `auto`, `prefill:NAME,decode:NAME`, `prefix:NAME,suffix:NAME`, or
    `-NAME[,-NAME]`, where auto may precede excluded names.

    A NAME is a registered name in any case, `module:Class` or `path/to/file.py:Class`. Paths are
    not loaded, and stay as they are written. An empty text means auto.

    Raises:
        UnknownBackendError: a name that is not registered, or another syntax.
        EnvironmentVariableError: another syntax, if the source is an environment variable.
    """
    if not text.strip():
        return Request(source)
    syntax = _Syntax(text, source, frozenset(known))
    found = [syntax.part(item.strip()) for item in text.split(",")]
    roles, kinds = dict(found), [kind for kind, _ in found]
    if kinds == [_ALONE]:
        return Request(source, found[0][1], found[0][1])
    if kinds == [_AUTO] or set(kinds[kinds[0] == _AUTO :]) == {_EXCLUDED}:
        return Request(source, excluded=frozenset(name for kind, name in found if kind != _AUTO))
    pair = next((pair for pair in PAIRS if sorted(pair) == sorted(kinds)), None)
    if pair is None:
        raise syntax.error()
    first, second = roles[pair[0]], roles[pair[1]]
    # One backend for prefills and decodes is that backend.
    single = pair == ("prefill", "decode") and first == second
    return Request(source, first, second, None if single else pair)


@dataclass(frozen=True)
class _Syntax:
    """The parts of one request, and the errors that name it."""

    text: str
    source: str
    known: frozenset[str]

    def part(self, item: str) -> tuple[str, str]:
        """(role, `_EXCLUDED`, `_AUTO` or `_ALONE`, its backend)."""
        if item.lower() == _AUTO:
            return _AUTO, ""
        if item.startswith("-"):
            return _EXCLUDED, self._backend(item[1:].strip(), registered=True)
        head, _, rest = (word.strip() for word in item.partition(":"))
        if not head:
            raise self.error()
        if head.lower() in ROLES:
            return head.lower(), self._backend(rest)
        if self._is_unknown_role(head, rest):
            raise self.error(
                f": {head!r} is not a phase; the phases are {', '.join(ROLES)}."
                f"{_nearest(head.lower(), ROLES)} Give"
            )
        return _ALONE, self._backend(item)

    def _is_unknown_role(self, head: str, rest: str) -> bool:
        """Whether `head:rest` is a role with a backend, rather than a module with a class."""
        nested = ":" in rest and not f"{head}:{rest}".rpartition(":")[0].endswith(".py")
        return rest.lower() in self.known or nested

    def _backend(self, name: str, registered: bool = False) -> str:
        if not name:
            raise self.error()
        if is_path(name) and not registered:
            return name
        if name.endswith(".py") and not registered:
            raise UnknownBackendError(
                f"{self.source}={self.text!r} names the file {name!r} without a class: write "
                f"{name}:CLASS"
            )
        if name.lower() not in self.known:
            raise unknown_backend_error(name.lower(), self.text, self.source, self.known)
        return name.lower()

    def error(self, reason: str = " is not a valid request: give") -> AttnlibError:
        """The error for another syntax."""
        kind = EnvironmentVariableError if self.source in ENVIRONMENT else UnknownBackendError
        return kind(
            f"{self.source}={self.text!r}{reason} one name, 'module:Class', "
            f"'path/to/file.py:Class', {PAIR_SYNTAX}, or '-NAME' for each backend that auto must "
            "skip"
        )


def is_path(name: str) -> bool:
    """Whether the name of one backend is `module:Class` or `path/to/file.py:Class`."""
    return ":" in name


def has_role(part: str) -> bool:
    """Whether a part of a request begins with a role of a pair, such as `prefill:NAME`."""
    head, colon, _ = part.partition(":")
    return bool(colon) and head.strip().lower() in ROLES


def unknown_backend_error(
    name: str, text: str, source: str, known: Iterable[str]
) -> UnknownBackendError:
    """The error for a name that is not registered, with the most similar one."""
    names = sorted(known)
    path = " A class is given as 'module:Class'." if "." in name else ""
    return UnknownBackendError(
        f"unknown attention backend {name!r} (from {source}={text!r}).{_nearest(name, names)}{path}"
        f" Registered: {', '.join(names)}."
    )


def _nearest(name: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
