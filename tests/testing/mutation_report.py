"""The result of a mutation run in a compact form, with the reason of each survivor.

    python -m tests.testing.mutation_report RUN.jsonl benchmarks/results/mutation.json

Reasons come from `mutation_reasons.json`: a file, a change, the line of the source, "equivalent" or
"unreachable", and why. A survivor without a reason counts as one that the suite should notice, and
so does an unreachable one. Run it at the commit of the run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.testing.mutation_runs import FORMS, ROOT

__all__ = ["report_of"]

REASONS = Path(__file__).with_name("mutation_reasons.json")
_Key = tuple[str, str, str]


def report_of(entries: Sequence[dict[str, Any]], reasons: dict[_Key, list[str]]) -> dict[str, Any]:
    """Counts, scores and survivors.

    Args:
        entries: the lines of a run, in order.
        reasons: (file, change, line of the source) -> kind and reason.
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
        text = (ROOT / one["file"]).read_text(encoding="utf-8").splitlines()[one["line"] - 1]
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the compact result of a run."""
    parser = argparse.ArgumentParser(prog="mutation_report", description=__doc__)
    parser.add_argument("run", type=Path, help="what mutation --json has written")
    parser.add_argument("result", type=Path, help="file to write")
    args = parser.parse_args(arguments)
    lines = args.run.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in takewhile(lambda line: line.endswith("}"), lines)]
    listed = json.loads(REASONS.read_text(encoding="utf-8"))
    reasons = {(file, change, source): rest for file, change, source, *rest in listed}
    report = report_of(entries, reasons)
    args.result.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for form, found in report["forms"].items():
        print(f"{form}: {found}")
    for one in report["survivors"]:
        if one["kind"] == "unexplained":
            print(f"{one['file']}:{one['line']}: {one['change']}: {', '.join(one['forms'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
