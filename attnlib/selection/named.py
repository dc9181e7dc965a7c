"""Backend classes by their names, whether or not they can run here."""

from __future__ import annotations

from attnlib.backends.base import AttentionBackend
from attnlib.backends.cascade import make_cascade
from attnlib.backends.cascade.schedule import DEFAULT_RULE, PrefixRule
from attnlib.backends.interface import check_backend_interface
from attnlib.errors import BackendUnavailableError, UnknownBackendError
from attnlib.selection.current import parsed
from attnlib.selection.registration import import_reason
from attnlib.selection.registry import registrations
from attnlib.selection.request import PAIR_SYNTAX

__all__ = ["load_backend", "merge_attention"]

Backend = type[AttentionBackend]


def load_backend(name: str) -> Backend:
    """The class of a name, a path or a pair, even if it cannot run here.

    Args:
        name: a request in the syntax of ATTNLIB_BACKEND, except `auto` and `-NAME`.

    Raises:
        UnknownBackendError: a name that is not registered, or a path without a class.
        BackendUnavailableError: it cannot be imported.
        RegistrationError: a class does not fit the interface.
        LayoutMismatchError: the two backends of a pair read no common cache layout.
    """
    request, given = parsed(name, "name")
    if request.is_auto:
        raise UnknownBackendError(
            f"name={name!r} leaves the choice to auto, and one backend is needed here: give a "
            f"name ({', '.join(registrations())}), 'module:Class', 'path/to/file.py:Class', or "
            f"{PAIR_SYNTAX}"
        )
    first, second = (
        given.get(part) or _load(part) for part in (str(request.first), str(request.second))
    )
    return request.combine(first, second)


def _load(name: str) -> Backend:
    """The class of a registered name."""
    entry = registrations()[name]
    try:
        backend = entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BackendUnavailableError(
            f"backend {entry.name!r} cannot be imported: {import_reason(error, entry)}"
        ) from error
    if isinstance(entry.target, str) and entry.origin != "built in":
        check_backend_interface(backend, entry.name)  # registration did not import the class
    return backend


def merge_attention(
    prefix: str | Backend, suffix: str | Backend, rule: PrefixRule = DEFAULT_RULE
) -> Backend:
    """The backend that computes prefixes which requests share with `prefix` and the rest of each
    request with `suffix`, and merges both by their log-sum-exps.

    The names "prefix:NAME,suffix:NAME" select the same backend. The batch states its prefixes in
    `CommonAttentionMetadata.shared_prefixes`.

    Args:
        prefix, suffix: names or classes of backends; both may be the same.
        rule: which prefixes are computed once; by default those that save at least 192 MiB of
            reads.

    Raises:
        UnknownBackendError: a name that is not registered.
        BackendUnavailableError: a backend that cannot be imported.
        LayoutMismatchError: the two read no common cache layout.
    """
    first, second = (
        load_backend(backend) if isinstance(backend, str) else backend
        for backend in (prefix, suffix)
    )
    return make_cascade(first, second, rule)
