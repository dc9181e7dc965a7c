"""Results as rows, and as a JSON document of rows and the runs that measured them.

A document may hold several runs, because long suites can be measured in several processes. Each row
has the index of its run, and rows of different runs are never compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from attnlib.bench.backends import PRIMARY, base_name, is_baseline
from attnlib.bench.case import BenchCase
from attnlib.bench.peaks import Peaks
from attnlib.bench.state_case import AnyCase, StateCase
from attnlib.errors import ContractError
from attnlib.fields import from_fields
from attnlib.testing.batch_spec import parse_batch

__all__ = [
    "NO_GRAPH",
    "SCHEMA",
    "Document",
    "Row",
    "Run",
    "best_other",
    "case_of_row",
    "merge",
    "ratio",
    "read_document",
    "write_document",
]

SCHEMA = "attnlib-bench"
VERSION = 2
NO_GRAPH = "no graph"
"""The beginning of the note of a row whose backend could not be captured."""
STATUSES = ("ok", "wrong", "unsupported", "unavailable", "failed", "not run")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One backend on one case.

    Attributes:
        case: name of the case.
        kind: decode, prefill or mixed.
        batch: the batch in the grammar of `attnlib.testing.batch_spec`.
        shape: the layer in words.
        settings: the fields of the case.
        backend: label of the backend.
        kernel: the kernel that the backend names, "" if it names none.
        status: one of `STATUSES`.
        reason: why the status is not "ok".
        checked: True if the correctness check passed; False if it was switched off.
        us: time of one call in microseconds, the median of the rounds.
        how: "graph" or "eager".
        low_us: the least round.
        high_us: the greatest round.
        eager_us: time of one eager call, host or device, whichever is longer.
        host_us: host time until an eager call returns.
        write_us: time of the cache write of this step.
        build_us: host time of one `build`.
        layer_us: host time of one call of the layer.
        gbps: rate of reading the necessary keys and values, or of moving a state step's bytes.
        tflops: rate over the visible pairs.
        share: least time at the peak rates of the run divided by `us`.
        error: largest error of the checked rows divided by the largest allowed error.
        first_call_s: seconds of the first call, compilation included.
        copies: copies of the cache.
        calls: calls per round.
        rounds: number of rounds.
        note: other facts, such as why there is no graph.
        run: index of the run in the document.
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
    """One run.

    Attributes:
        provenance: hardware, versions, commit, command and date.
        peaks: peak rates of the device in this run, the fields of `Peaks`.
    """

    provenance: dict[str, Any]
    peaks: dict[str, Any]


@dataclass(frozen=True)
class Document:
    """Runs and their rows."""

    runs: tuple[Run, ...]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """The JSON text. `version` changes if the keys or their meaning change."""
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
    """Write the JSON file atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(document.to_json() + "\n", encoding="utf-8")
    part.replace(target)


def read_document(path: str | Path) -> Document:
    """Read what `write_document` wrote.

    Raises:
        ContractError: no such file, not JSON, another schema or version, or a run or a row with
            missing, unknown or wrong values.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(
            f"{path} cannot be read as a result of attnlib bench --json: {error}"
        ) from error
    if not isinstance(data, dict) or (data.get("schema"), data.get("version")) != (SCHEMA, VERSION):
        raise ContractError(
            f"{path} is not an {SCHEMA} document of version {VERSION}; measure again with attnlib "
            "bench --json"
        )
    runs, rows = data.get("runs"), data.get("rows")
    if not isinstance(runs, list) or not isinstance(rows, list):
        raise ContractError(f"{path} has no lists `runs` and `rows`; measure again")
    read = Document(
        tuple(from_fields(Run, run, f"{path}: run {at}") for at, run in enumerate(runs)),
        tuple(from_fields(Row, row, f"{path}: row {at}") for at, row in enumerate(rows)),
    )
    for number, run in enumerate(read.runs):
        from_fields(Peaks, run.peaks, f"{path}: peaks of run {number}")
    for number, row in enumerate(read.rows):
        if row.status not in STATUSES or not 0 <= row.run < len(runs):
            raise ContractError(
                f"{path}: row {number} has status {row.status!r} and run {row.run}, of "
                f"{', '.join(STATUSES)} and {len(runs)} runs; measure again"
            )
    return read


def merge(documents: Sequence[Document]) -> Document:
    """Join documents.

    If a case was measured several times, all of its rows come from the last run that has a result
    for it.
    """
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


def case_of_row(row: Row) -> AnyCase:
    """The case that a row was measured on.

    Raises:
        ContractError: the settings are not those of a case.
    """
    try:
        if "work" in row.settings:
            return StateCase(**row.settings)
        return BenchCase(**{**row.settings, "batch": parse_batch(row.settings["batch"])})
    except (TypeError, KeyError) as error:
        raise ContractError(
            f"the row of {row.backend} on {row.case!r} has other settings than a case ({error}); "
            "measure again"
        ) from None


def best_other(rows: Iterable[Row], like: Row) -> Row | None:
    """The fastest row of another backend with the case, run and kind of timing of `like`.

    Returns None if there is none.

    `torch`, the reference, is left out.
    """
    others = [
        row
        for row in rows
        if row.status == "ok"
        and is_baseline(row.backend)
        and (row.case, row.run, row.how) == (like.case, like.run, like.how)
        and row.us
    ]
    return min(others, key=lambda row: row.us or 0.0, default=None)


def ratio(rows: Sequence[Row], row: Row) -> float | None:
    """The time of `triton` divided by that of `best_other`.

    None for other backends or if one of the two has no time.
    """
    other = best_other(rows, row) if base_name(row.backend) == PRIMARY and row.us else None
    return row.us / other.us if other is not None and row.us and other.us else None
