"""Runs transformers' common tests of models with sdpa, with attnlib, and with half of its output.

    pip download transformers==5.24.0 --no-deps --no-binary :all:
    tar xzf transformers-5.24.0.tar.gz
    python -m benchmarks.upstream_tests.hf --source transformers-5.24.0 --out result.json

Needs `pip install parameterized`. Nothing of the copy is part of this repository. A test counts as
different if its outcome with attnlib is another one than with sdpa; tests that fail with half of
the output, and pass with attnlib, prove values.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import transformers

from attnlib.bench.provenance import provenance
from benchmarks.upstream_tests.hf_families import FAMILIES
from benchmarks.upstream_tests.hf_source import SOURCE

RUNS = ("sdpa", "attnlib", "halved")
REFUSAL = "attnlib computes inference only"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="folder of the copy")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="selects tests, as in pytest")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=30, help="limit of one process")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    works = [(run, family) for family in options.families for run in RUNS]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = dict(
            zip(works, pool.map(lambda work: run_tests(*work, options), works), strict=True)
        )
    rows = {family: compare(family, outcomes) for family in options.families}
    for family, row in rows.items():
        print(family, json.dumps(row))
    totals: Counter[str] = Counter()
    for row in rows.values():
        totals.update({name: n for name, n in row.items() if isinstance(n, int)})
    print("total", dict(totals))
    if options.out:
        facts = {**provenance(), "transformers": transformers.__version__}
        document = {**facts, "totals": dict(totals), "families": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(totals["wrong"] > 0)


def run_tests(run: str, family: str, options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Test -> outcome (passed, failed, skipped) and message of one run of one family."""
    environment = os.environ | {
        SOURCE: str((options.source / "tests").resolve()),
        "ATTNLIB_RUNS": run,
        "ATTNLIB_FAMILIES": family,
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder,
            "-p", "benchmarks.upstream_tests.hf_plugin", "-p", "no:cacheprovider",
            "--junitxml", str(report), str(Path(__file__).with_name("hf_families.py")),
        ]  # fmt: skip
        if options.k:
            command += ["-k", options.k]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60 * options.minutes
        )
        if not report.exists():
            raise SystemExit(f"{run} {family}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return dict(_outcomes(ElementTree.parse(report).getroot()))


def _outcomes(root: ElementTree.Element) -> Any:
    for case in root.iter("testcase"):
        outcome, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, message = "failed", child.get("message") or child.text or ""
            elif child.tag == "skipped":
                outcome, message = "skipped", child.get("message") or ""
        yield case.get("name"), (outcome, message)


def compare(family: str, outcomes: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """The counts of one family, and the tests whose outcome differs."""
    sdpa, ours, halved = (outcomes[run, family] for run in RUNS)
    row: dict[str, Any] = Counter()
    differs = {}
    for test, (outcome, _) in sdpa.items():
        found, message = ours.get(test, ("absent", ""))
        row["tests"] += 1
        row[f"sdpa {outcome}"] += 1
        if found == outcome:
            row["same"] += 1
        elif REFUSAL in message:
            row["refused: inference only"] += 1
        elif outcome == "failed":
            row["attnlib passes, sdpa does not"] += 1
        else:
            row["wrong"] += 1
            differs[test] = f"{outcome} -> {found}: {message[:300]}"
        if found == "passed" and halved.get(test, ("", ""))[0] == "failed":
            row["proves values"] += 1
    return {**row, "differs": differs}


if __name__ == "__main__":
    sys.exit(main())
