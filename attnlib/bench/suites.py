"""Named cases: the published rows (`anchors`), rows over quantized caches, a short suite, and small
cases for CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from attnlib.bench.case_text import parse_case
from attnlib.bench.coverage_cases import COVERAGE, CPU
from attnlib.bench.gap_cases import GAP_TARGETS, GAPS
from attnlib.bench.named_cases import (
    ANCHORS,
    ENTRIES,
    FLOAT8,
    FLOAT8_QUERIES,
    FORMATS,
    MLA,
    QUICK,
    SPARSE,
)
from attnlib.bench.state_case import AnyCase
from attnlib.bench.state_cases import STATE_TARGETS, STATES
from attnlib.bench.targets import Target
from attnlib.errors import ContractError

__all__ = ["TARGETS", "SUITES", "choose_cases", "known_cases"]


SUITES: Mapping[str, tuple[AnyCase, ...]] = {
    "anchors": ANCHORS,
    "float8": FLOAT8,
    "formats": FORMATS,
    "coverage": COVERAGE,
    "quick": tuple(case for case in ANCHORS if case.name in QUICK),
    "float8_queries": FLOAT8_QUERIES,
    "mla": MLA,
    "sparse": SPARSE,
    "streams": ENTRIES,
    "gaps": GAPS,
    "states": STATES,
    "cpu": CPU,
}
"""Name -> cases. `anchors` are the rows of the published results; `float8` has decodes and prefills
over a float8 cache, `float8_queries` the same where queries may be rounded; `formats` has caches
with scales in the page, and float8 with heads of 64 and with blocks of 128, each next to bfloat16;
`mla` has latent caches and the expanded prefill of the same model, `sparse` lists of selected
blocks and tokens, `streams` own keys and compressed entries, `states` state layers; `gaps` has rows
with a target; `coverage` has other head sizes, page sizes and features, and uneven batches.
"""


TARGETS: Mapping[str, tuple[Target, ...]] = {**GAP_TARGETS, **STATE_TARGETS}
"""Name of a case -> what `triton` must reach on it."""


def known_cases() -> dict[str, AnyCase]:
    """Every named case."""
    return {case.name: case for cases in SUITES.values() for case in cases}


def choose_cases(
    patterns: Sequence[str], suite: str | None, default: str, block_size: int | None = None
) -> list[AnyCase]:
    """The cases of a run, without duplicates, in the order of the patterns.

    Args:
        patterns: names, globs over names (`decode-*`), or cases in the grammar of `case`; empty for
            the whole suite.
        suite: the suite to search; None searches all suites.
        default: the suite of a run without patterns and `suite`.
        block_size: of every case; None keeps that of each case.

    Raises:
        ContractError: a pattern that matches no name and is not a case.
    """
    pool = {case.name: case for case in SUITES[suite]} if suite else known_cases()
    chosen: list[AnyCase] = [] if patterns else list(SUITES[suite or default])
    for pattern in patterns:
        named = [case for name, case in pool.items() if fnmatchcase(name, pattern)]
        chosen += named or [_parsed(pattern, pool)]
    paged = [case.with_block_size(block_size) if block_size else case for case in chosen]
    return list({case.name: case for case in paged}.values())


def _parsed(pattern: str, pool: Mapping[str, AnyCase]) -> AnyCase:
    try:
        return parse_case(pattern)
    except ContractError as error:
        raise ContractError(
            f"{pattern!r} is neither one of the {len(pool)} names that --list shows nor a batch: "
            f"{error}"
        ) from None
