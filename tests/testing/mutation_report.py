"""The result of a mutation run in a compact form, with the reason of each survivor.

    python -m tests.testing.mutation_report RUN.jsonl benchmarks/results/mutation.json
    python -m tests.testing.mutation_report RUN.jsonl RESULT.json --again SURVIVORS.jsonl

Reasons come from `mutation_reasons.json`: a file, a change, the line of the source, "equivalent",
"unreachable" or "within budget", and why. All survivors but the equivalent ones count as mutants
that the suite should notice, with or without a reason. `--again` gives a later run of the survivors
(`mutation --only`), with the checks that were written for them: what it notices counts, and the
result has the score of the run alone, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.testing.mutation_runs import FORMS, ROOT

__all__ = ["replaced", "report_of"]

REASONS = Path(__file__).with_name("mutation_reasons.json")
_Key = tuple[str, str, str]


def replaced(
    entries: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of a run, with the survivors that a later run has noticed. A mutant is found by
    its file, column and change, if the later run has only one of them."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in again:
        if "file" in one:
            found.setdefault((one["file"], one["column"], one["change"]), []).append(one)
    result = []
    for one in entries:
        same = found.get((one.get("file"), one.get("column"), one.get("change")), [])
        forms = {form: same[0][form] for form in FORMS} if len(same) == 1 else {}
        kept = {
            form: later
            for form, later in forms.items()
            if one[form]["outcome"] == "survives" != later["outcome"]
        }
        result.append({**one, **kept})
    return result


@functools.cache
def _lines(commit: str, file: str) -> list[str]:
    """The lines of a file at the commit of a run."""
    command = ["git", "-C", str(ROOT), "show", f"{commit.removesuffix('-dirty')}:{file}"]
    return subprocess.check_output(command, text=True).splitlines()


def report_of(
    entries: Sequence[dict[str, Any]],
    reasons: dict[_Key, list[str]],
    lines_of: Callable[[str, str], Sequence[str]] = _lines,
) -> dict[str, Any]:
    """Counts, scores and survivors.

    Args:
        entries: the lines of a run, in order.
        reasons: (file, change, line of the source) -> kind and reason.
        lines_of: function of a commit and a file that returns the lines of the file.
    """
    run = entries[0]
    counts = [one for one in entries if "form" in one]
    done = counts[0]["run"] if counts else 0
    mutants = [one for one in entries if "file" in one]
    survivors, equivalent = [], dict.fromkeys(FORMS, 0)
    for one in mutants:
        missed = [form for form in FORMS if one[form]["outcome"] == "survives"]
        if not missed:
            continue
        text = lines_of(run["commit"], one["file"])[one["line"] - 1]
        kind, why = reasons.get((one["file"], one["change"], text.strip()), ["unexplained", ""])
        for form in missed:
            equivalent[form] += kind == "equivalent"
        survivors.append(
            {"file": one["file"], "line": one["line"], "source": text.strip(),
             "change": one["change"], "forms": missed, "executed": one["full"]["executed"],
             "kind": kind, "reason": why}
        )  # fmt: skip
    forms = {}
    for form in FORMS:
        noticed = sum(one[form]["outcome"] != "survives" for one in mutants)
        other = len(mutants) - equivalent[form]
        share = round(100.0 * noticed / other, 1) if other else 0.0
        forms[form] = {"mutants": len(mutants), "noticed": noticed,
                       "equivalent": equivalent[form], "noticed_percent": share}  # fmt: skip
    return {"run": run, "counted_by_the_run": done, "forms": forms, "survivors": survivors}


def _entries(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of `mutation --json`; a run that goes on ends in half a line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in takewhile(lambda line: line.endswith("}"), lines)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the compact result of a run."""
    parser = argparse.ArgumentParser(prog="mutation_report", description=__doc__)
    parser.add_argument("run", type=Path, help="what mutation --json has written")
    parser.add_argument("result", type=Path, help="file to write")
    parser.add_argument("--again", type=Path, help="a later run of the survivors")
    args = parser.parse_args(arguments)
    entries = _entries(args.run)
    listed = json.loads(REASONS.read_text(encoding="utf-8"))
    reasons = {(file, change, source): rest for file, change, source, *rest in listed}
    report = report_of(entries, reasons)
    if args.again:
        later, first = _entries(args.again), report["forms"]
        report = report_of(replaced(entries, later), reasons)
        report["run"] |= {"again": later[0], "forms_without_again": first}
    args.result.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for form, found in report["forms"].items():
        print(f"{form}: {found}")
    for one in report["survivors"]:
        if one["kind"] == "unexplained":
            print(f"{one['file']}:{one['line']}: {one['change']}: {', '.join(one['forms'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
