"""The decision: which backend fits a request, from the facts that are passed in.

Nothing here imports a backend module or inspects the machine: `probe` does both for the caller, so
that tests can decide for any hardware.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from attnlib.backends.base import AttentionBackend
from attnlib.backends.cascade import make_cascade
from attnlib.backends.composite import make_composite
from attnlib.device import DeviceInfo
from attnlib.errors import LayoutMismatchError, UnknownBackendError
from attnlib.selection.registry import Registration
from attnlib.selection.report import CandidateReport, SelectionReport, SelectionStatus
from attnlib.spec import AttentionSpec, AttentionType
from attnlib.tuning import Ranking

__all__ = [
    "AUTO",
    "PAIR_SYNTAX",
    "Probe",
    "Request",
    "auto_order",
    "decide",
    "is_pair",
    "parse_request",
    "unknown_backend_error",
]

Backend = type[AttentionBackend]
Probe = Callable[[Registration], "tuple[Backend | None, list[str]]"]
"""Registration -> (its class, or None if it cannot be imported; why it is unavailable)."""

_INTERPRETED_ON_CPU = ("triton",)
"""Backends that a CPU can only interpret: correct, but thousands of times slower, so auto skips
them there. They can be selected by name."""


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
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return UnknownBackendError(
        f"unknown attention backend {name!r} (from {source}={text!r}).{hint} "
        f"Registered: {', '.join(names)}."
    )


def auto_order(
    entries: Iterable[Registration], device: DeviceInfo, measured: Sequence[str] = ()
) -> list[Registration]:
    """Backends that auto considers on `device`, best first; equal priorities by name.

    Args:
        entries: all known backends.
        device: facts about the device.
        measured: names in the order of a tuning table. These backends exchange places among
            themselves; a backend that was not measured keeps the place of its priority.
    """
    candidates = [
        entry
        for entry in entries
        if entry.priority is not None
        and not (device.type == "cpu" and entry.name in _INTERPRETED_ON_CPU)
    ]
    ordered = sorted(candidates, key=lambda entry: (-(entry.priority or 0), entry.name))
    by_name = {entry.name: entry for entry in ordered}
    ranked = iter([by_name[name] for name in measured if name in by_name])
    return [next(ranked) if entry.name in measured else entry for entry in ordered]


def decide(
    spec: AttentionSpec,
    device: DeviceInfo,
    entries: Sequence[Registration],
    request: Request,
    probe: Probe,
    ranking: Ranking | None = None,
) -> SelectionReport:
    """Choose a backend and report on every candidate.

    Args:
        spec: what the layer needs.
        device: facts about the device.
        entries: all known backends.
        request: what the user asks for.
        probe: loads a backend and checks its availability; not called for excluded backends.
        ranking: the measured order of backends for this kind of layer, if there is one.
    """
    order = auto_order(entries, device, ranking.order if ranking else ())
    rest = sorted((entry for entry in entries if entry not in order), key=lambda e: e.name)
    candidates: list[CandidateReport] = []
    accepted: dict[str, Backend] = {}
    for entry in (*order, *rest):
        if entry.name in request.excluded:
            reason = f"excluded by {request.source}"
            candidates.append(CandidateReport(entry.name, SelectionStatus.EXCLUDED, (reason,)))
            continue
        backend, unavailable_reasons = probe(entry)
        candidate = _evaluate(spec, device, entry.name, backend, unavailable_reasons)
        candidates.append(candidate)
        if backend is not None and candidate.status is SelectionStatus.ACCEPTED:
            accepted[entry.name] = backend
    chosen = None
    if request.is_auto:
        chosen = next((entry.name for entry in order if entry.name in accepted), None)
    elif {request.first, request.second} <= accepted.keys():
        chosen = request.text
        if request.roles is not None:
            pair = _evaluate_pair(spec, device, request, accepted)
            candidates.insert(0, pair)
            chosen = chosen if pair.status is SelectionStatus.ACCEPTED else None
    in_order = {entry.name for entry in order}
    return SelectionReport(
        chosen,
        "auto" if request.is_auto else request.source,
        str(device),
        tuple(_with_reason(c, chosen, request, ranking, c.name in in_order) for c in candidates),
    )


def _evaluate(
    spec: AttentionSpec,
    device: DeviceInfo,
    name: str,
    backend: Backend | None,
    unavailable_reasons: Sequence[str] = (),
) -> CandidateReport:
    if backend is None or unavailable_reasons:
        return CandidateReport(name, SelectionStatus.UNAVAILABLE, tuple(unavailable_reasons))
    try:
        reasons = tuple(backend.validate_configuration(spec, device))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a faulty backend must not prevent the choice of another one
        reasons = (f"its validate_configuration raised {type(error).__name__}: {error}",)
    if reasons:
        return CandidateReport(name, SelectionStatus.UNSUPPORTED, reasons)
    lines = _explain_lines(backend, spec, device)
    return CandidateReport(name, SelectionStatus.ACCEPTED, explain_lines=lines)


def _explain_lines(backend: Backend, spec: AttentionSpec, device: DeviceInfo) -> tuple[str, ...]:
    try:
        lines = list(backend.explain_lines(spec, device))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # missing information must not prevent the choice
        lines = [f"its explain_lines raised {type(error).__name__}: {error}"]
    if backend.capabilities.needs_finite_cache:
        lines.append("requires a cache without NaN or Inf in unused slots")
    decodes = spec.attn_type is AttentionType.DECODER and not spec.use_mla
    if backend.capabilities.rotary_write and decodes:
        # The capability leaves pages that hold their scales out.
        fused = not spec.kv_format.scales_in_page
        lines.append(
            "write:   one launch, with q/k norm and rotation"
            if fused
            else "write:   one launch; q/k norm and rotation take separate ones"
        )
    return tuple(lines)


def _evaluate_pair(
    spec: AttentionSpec, device: DeviceInfo, request: Request, accepted: dict[str, Backend]
) -> CandidateReport:
    """Two accepted backends may not fit together: no common layout, or no decode phase."""
    try:
        pair = request.combine(accepted[str(request.first)], accepted[str(request.second)])
    except LayoutMismatchError as error:
        return CandidateReport(request.text, SelectionStatus.UNSUPPORTED, (str(error),))
    return _evaluate(spec, device, request.text, pair)


def _with_reason(
    candidate: CandidateReport,
    chosen: str | None,
    request: Request,
    ranking: Ranking | None,
    in_order: bool,
) -> CandidateReport:
    """Add to an accepted candidate why it was chosen or not."""
    if candidate.status is not SelectionStatus.ACCEPTED:
        return candidate
    measured = ranking.message(candidate.name) if ranking and request.is_auto else None
    if candidate.name == chosen:
        reason = measured or ""
    elif not request.is_auto:
        reason = "part of the requested pair" if candidate.name in request.names else ""
    else:
        reason = measured or ("lower priority" if in_order else "selected only by name")
    return CandidateReport(
        candidate.name, candidate.status, (reason,) if reason else (), candidate.explain_lines
    )
