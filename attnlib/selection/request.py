"""What the user asks for: by argument, `use_backend` or ATTNLIB_BACKEND, in one syntax."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attnlib.backends.base import AttentionBackend
from attnlib.backends.cascade import make_cascade
from attnlib.backends.composite import make_composite
from attnlib.errors import UnknownBackendError

__all__ = ["AUTO", "PAIR_SYNTAX", "Request", "is_pair", "parse_request", "unknown_backend_error"]

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
PAIR_SYNTAX = ", ".join(f"'{first}:NAME,{second}:NAME'" for first, second in PAIRS)


def parse_request(text: str, source: str, known: Iterable[str]) -> Request:
    """Parse `NAME`, `auto`, `prefill:NAME,decode:NAME`, `prefix:NAME,suffix:NAME`, or
    `-NAME[,-NAME]`.

    Raises:
        UnknownBackendError: a name that is not registered, or another syntax.
    """
    names, roles, excluded, plain = set(known), {}, set(), []
    pairs = {role for pair in PAIRS for role in pair}
    for part in (item.strip().lower() for item in text.split(",")):
        if not part or part == "auto":
            continue
        role, colon, rest = part.partition(":")
        name = rest.strip() if colon and role in pairs else part.removeprefix("-")
        if name not in names:
            raise unknown_backend_error(name, text, source, names)
        if part.startswith("-"):
            excluded.add(name)
        elif name != part:
            roles[role] = name
        else:
            plain.append(name)
    pair = next((pair for pair in PAIRS if set(pair) == roles.keys()), None)
    if len(plain) > 1 or (plain and (roles or excluded)) or (roles and (excluded or pair is None)):
        raise UnknownBackendError(
            f"{source}={text!r} is not a valid request: give one name, {PAIR_SYNTAX}, or '-NAME' "
            "for each backend that auto must skip"
        )
    if plain:
        return Request(source, plain[0], plain[0])
    if pair is None:
        return Request(source, excluded=frozenset(excluded))
    first, second = roles[pair[0]], roles[pair[1]]
    # One backend for prefills and decodes is that backend.
    single = pair == ("prefill", "decode") and first == second
    return Request(source, first, second, None if single else pair)


def is_pair(text: str) -> bool:
    """Whether a request begins with a role of a pair, such as `prefill:NAME`."""
    return text.strip().lower().partition(":")[0] in {role for pair in PAIRS for role in pair}


def unknown_backend_error(
    name: str, text: str, source: str, known: Iterable[str]
) -> UnknownBackendError:
    """The error for a name that is not registered, with the most similar one."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return UnknownBackendError(
        f"unknown attention backend {name!r} (from {source}={text!r}).{hint} "
        f"Registered: {', '.join(names)}."
    )
