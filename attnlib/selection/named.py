"""Backend classes by their names, whether or not they can run here."""

from __future__ import annotations

from attnlib.backends.base import AttentionBackend
from attnlib.backends.cascade import make_cascade
from attnlib.backends.cascade.schedule import DEFAULT_RULE, PrefixRule
from attnlib.errors import BackendUnavailableError
from attnlib.selection.registration import import_reason
from attnlib.selection.registry import lookup, registrations
from attnlib.selection.request import parse_request, unknown_backend_error

__all__ = ["load_backend", "merge_attention"]

Backend = type[AttentionBackend]


def load_backend(name: str) -> Backend:
    """The class of a name or a pair, even if it cannot run here.

    Args:
        name: NAME, `prefill:NAME,decode:NAME` or `prefix:NAME,suffix:NAME`.

    Raises:
        UnknownBackendError: a name that is not registered.
        BackendUnavailableError: it cannot be imported.
        LayoutMismatchError: the two backends of a pair read no common cache layout.
    """
    if ":" in name:
        request = parse_request(name, "name", registrations())
        return request.combine(load_backend(str(request.first)), load_backend(str(request.second)))
    entry = lookup(name)
    if entry is None:
        raise unknown_backend_error(name.strip().lower(), name, "name", registrations())
    try:
        return entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BackendUnavailableError(
            f"backend {entry.name!r} cannot be imported: {import_reason(error, entry)}"
        ) from error


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
