"""Results as plain rows, and as a JSON document that keeps all of them together with where they come from.

A document may hold several runs: on a machine that is lent by the minute the cases are measured in parts. Each row knows
its run, and rows of different runs are never compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from attnlib.bench.backends import HOUSE, OURS, base_name
from attnlib.errors import ContractError

__all__ = [
    "SCHEMA",
    "Document",
    "Row",
    "Run",
    "best_peer",
    "merge",
    "ratio",
    "read_document",
    "write_document",
]

SCHEMA = "attnlib-bench"
VERSION = 1
STATUSES = ("ok", "wrong", "refused", "unavailable", "failed", "not run")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One backend on one case.

    Attributes:
        case, kind, batch, shape: the case's name, kind, grammar and words; settings: its fields.
        backend: its label; kernel: what it says it runs, "" when it says nothing.
        status: one of `STATUSES`; reason: why it is not ok.
        checked: whether the gate was passed (it can be switched off).
        us: time of one call, the median of the rounds; how: graph or eager; low_us, high_us: of the rounds.
        eager_us: host and device, one eager call; host_us: until it returns.
        write_us: the cache write of this step, timed as `us` is.
        build_us: host time of one `build`; layer_us: host time of one `Attention` call.
        gbps: of necessary keys and values; tflops: over visible pairs; share: of the time that the ceilings allow.
        error: largest error over largest allowed error, where the gate looked.
        first_call_s: with compilation; copies: of the cache; calls, rounds: how `us` was measured.
        note: what else must be known, such as why there is no graph.
        run: index of the run in its document.
    """

    case: str
    kind: str
    batch: str
    shape: str
    backend: str
    status: str
    settings: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    kernel: str = ""
    checked: bool = False
    us: float | None = None
    how: str = ""
    low_us: float | None = None
    high_us: float | None = None
    eager_us: float | None = None
    host_us: float | None = None
    write_us: float | None = None
    build_us: float | None = None
    layer_us: float | None = None
    gbps: float | None = None
    tflops: float | None = None
    share: float | None = None
    error: float | None = None
    first_call_s: float | None = None
    copies: int = 0
    calls: int = 0
    rounds: int = 0
    note: str = ""
    run: int = 0


@dataclass(frozen=True)
class Run:
    """Where rows come from: hardware, versions, commit, command and date; and the ceilings of that run."""

    provenance: dict[str, Any]
    ceilings: dict[str, Any]


@dataclass(frozen=True)
class Document:
    """Runs and their rows."""

    runs: tuple[Run, ...]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """Everything, with stable keys; `version` changes when their meaning does."""
        runs = [asdict(run) for run in self.runs]
        return json.dumps(
            {
                "schema": SCHEMA,
                "version": VERSION,
                "runs": runs,
                "rows": [asdict(row) for row in self.rows],
            },
            indent=1,
        )


def write_document(document: Document, path: str | Path) -> None:
    """Write JSON, whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(document.to_json() + "\n", encoding="utf-8")
    part.replace(target)


def read_document(path: str | Path) -> Document:
    """Read what `write_document` wrote.

    Raises:
        ContractError: no such file, no JSON, another schema or version, or a row with missing or unknown keys.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ContractError(
            f"{path} cannot be read as a result of attnlib bench --json: {error}"
        ) from error
    if not isinstance(data, dict) or (data.get("schema"), data.get("version")) != (SCHEMA, VERSION):
        raise ContractError(
            f"{path} is no {SCHEMA} document of version {VERSION}; write it again with attnlib bench --json"
        )
    known = {item.name for item in fields(Row)}
    for number, row in enumerate(data["rows"]):
        if (
            set(row) != known
            or row["status"] not in STATUSES
            or not 0 <= row["run"] < len(data["runs"])
        ):
            told = f"keys {sorted(set(row) ^ known)}, status {row.get('status')!r}, run {row.get('run')}"
            raise ContractError(
                f"{path}: row {number} does not fit version {VERSION}: {told}; measure again with this version of attnlib"
            )
    return Document(
        tuple(Run(**run) for run in data["runs"]), tuple(Row(**row) for row in data["rows"])
    )


def merge(documents: Sequence[Document]) -> Document:
    """One document of several; a case that was measured again counts with its last run, all backends of it, unless that has no time for any."""
    runs: list[Run] = []
    groups: dict[str, list[Row]] = {}
    for document in documents:
        fresh: dict[tuple[str, int], list[Row]] = {}
        for row in document.rows:
            fresh.setdefault((row.case, row.run), []).append(replace(row, run=row.run + len(runs)))
        for (case, _), rows in fresh.items():
            if case not in groups or any(row.status != "not run" for row in rows):
                groups[case] = rows
        runs += document.runs
    return Document(tuple(runs), tuple(row for rows in groups.values() for row in rows))


def best_peer(rows: Iterable[Row], like: Row) -> Row | None:
    """The fastest right peer on the case of `like`, in its run and timed the same way; None when there is none."""
    peers = [
        row
        for row in rows
        if row.status == "ok"
        and base_name(row.backend) not in HOUSE
        and (row.case, row.run, row.how) == (like.case, like.run, like.how)
        and row.us
    ]
    return min(peers, key=lambda row: row.us or 0.0, default=None)


def ratio(rows: Sequence[Row], row: Row) -> float | None:
    """The time of `triton` (with or without settings) over the best peer's; None for other backends and where one of the two has no time."""
    peer = best_peer(rows, row) if base_name(row.backend) == OURS and row.us else None
    return row.us / peer.us if peer is not None and row.us and peer.us else None
