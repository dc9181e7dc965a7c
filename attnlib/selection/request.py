"""What the user asked for, read from text: a name, a pair for the two phases, or auto with some candidates taken out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from attnlib.errors import UnknownBackendError

__all__ = ["AUTO", "Request", "parse_request", "unknown_backend"]


@dataclass(frozen=True)
class Request:
    """One wish.

    Attributes:
        source: where it came from, for messages: "argument", "use_backend", "ATTNLIB_BACKEND" or "default".
        prefill, decode: the backends insisted on; both None for auto.
        excluded: names that auto must not even import.
    """

    source: str
    prefill: str | None = None
    decode: str | None = None
    excluded: frozenset[str] = frozenset()

    @property
    def is_auto(self) -> bool:
        """True when nothing is insisted on."""
        return self.prefill is None

    @property
    def is_composite(self) -> bool:
        """True when the two phases name different backends."""
        return self.prefill != self.decode

    @property
    def text(self) -> str:
        """The wish as users write it."""
        if self.is_auto:
            return ",".join(["auto", *(f"-{name}" for name in sorted(self.excluded))])
        return (
            f"prefill:{self.prefill},decode:{self.decode}"
            if self.is_composite
            else str(self.prefill)
        )


AUTO = Request("default")


def parse_request(text: str, source: str, known: Iterable[str]) -> Request:
    """Read `name`, `auto`, `prefill:NAME,decode:NAME`, or `-NAME[,-NAME]`.

    Raises:
        UnknownBackendError: a name that nobody registered, or a form that is none of these.
    """
    names, phases, excluded, plain = set(known), {}, set(), []
    for part in (piece.strip().lower() for piece in text.split(",")):
        if not part or part == "auto":
            continue
        phase, colon, rest = part.partition(":")
        name = rest.strip() if colon and phase in ("prefill", "decode") else part.removeprefix("-")
        if name not in names:
            raise unknown_backend(name, text, source, names)
        if part.startswith("-"):
            excluded.add(name)
        elif name != part:
            phases[phase] = name
        else:
            plain.append(name)
    if (
        len(plain) > 1
        or (plain and (phases or excluded))
        or (phases and (excluded or len(phases) != 2))
    ):
        raise UnknownBackendError(
            f"{source}={text!r} is not understood: give one name, 'prefill:NAME,decode:NAME', or '-NAME' for each candidate to take out of auto"
        )
    if plain:
        return Request(source, plain[0], plain[0])
    return Request(source, phases.get("prefill"), phases.get("decode"), frozenset(excluded))


def unknown_backend(name: str, text: str, source: str, known: Iterable[str]) -> UnknownBackendError:
    """The error for a name that nobody registered."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return UnknownBackendError(
        f"unknown attention backend {name!r} (from {source}={text!r}).{hint} Registered: {', '.join(names)}."
    )
