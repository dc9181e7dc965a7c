"""The generated parts of docs/compatibility.md: the table of rows of each seed, and their number.

<!-- rows: 1 -->   ...   <!-- end of rows -->      the rows of seed 1
<!-- counts -->    ...   <!-- end of counts -->    how many are the same
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the next imports where a script of this folder runs

from tests.compat.seeds.rows import ROWS, SEEDS  # noqa: E402
from tests.compat.seeds.table import Row  # noqa: E402

__all__ = ["counts", "fill", "table"]

ROWS_OF = re.compile(r"(?<=<!-- rows: )(?P<seed>\d) -->\n.*?(?=<!-- end of rows -->)", re.S)
COUNTS = re.compile(r"(?<=<!-- counts -->\n).*?(?=<!-- end of counts -->)", re.S)
ARGUMENTS = re.compile(r"(`[^`]*?\w)\(([^,()`]+),[^()`]*\)`")
KINDS = ("same", "other name", "differs")


def fill(page: str) -> str:
    """The page with the tables and numbers of its markers."""
    seeds = {seed.number: seed for seed in SEEDS}

    def rows_of(match: re.Match[str]) -> str:
        seed = seeds[int(match["seed"])]
        return f"{match['seed']} -->\n\n{table(seed.rows, seed.module)}\n"

    return COUNTS.sub(lambda _: f"\n{counts(ROWS)}\n", ROWS_OF.sub(rows_of, page))


def table(rows: Iterable[Row], module: str) -> str:
    """One line for each row; a second cell only where it differs from the original.

    Args:
        rows: of one seed.
        module: of rows that name no other one.
    """
    lines = ["row, name in the original | other path, difference", "--- | ---"]
    for row in rows:
        is_same = row.claim.kind == "same"
        claim = "" if is_same else f"{row.claim.kind}: {row.claim.text}"
        module_note = f"from `{row.module}`" if row.module != module else ""
        note = "; ".join(filter(None, (claim, module_note, "" if is_same else row.note)))
        name = ARGUMENTS.sub(r"\1(\2, ...)`", row.name)  # the rows have all arguments
        lines.append(f"{row.number} {name} | {note}" if note else f"{row.number} {name}")
    return "\n".join(lines) + "\n"


def counts(rows: Iterable[Row]) -> str:
    """Rows of each kind for each seed, and for all."""
    lines = [f"document | {' | '.join(KINDS)}", "--- | ---: | ---: | ---:"]
    found = Counter((row.document, row.claim.kind) for row in rows)
    for document in dict.fromkeys(document for document, _ in found):
        numbers = (str(found[document, kind]) for kind in KINDS)
        lines.append(f"{document} | {' | '.join(numbers)}")
    totals = (sum(n for (_, each), n in found.items() if each == kind) for kind in KINDS)
    return "\n".join([*lines, f"all | {' | '.join(map(str, totals))}"]) + "\n"
