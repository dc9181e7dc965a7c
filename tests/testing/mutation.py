"""Change the torch backend at one place, and see whether `attnlib verify` notices.

    python -m tests.testing.mutation --sample 500 --seed 0 --jobs 2 --json mutants.jsonl
    python -m tests.testing.mutation --only mutants.jsonl        # the survivors again

The mutants are those of `attnlib/ops/torch` and `attnlib/backends/torch`, see `mutants.py`. Each
runs the full form of `attnlib verify torch` on the CPU, in a process of its own that ends at the
first failed case, and then the short form if the full form has noticed it: a survivor of the full
form counts as a survivor of the short one. An exception outside the cases, the end of the process
and a run beyond `--timeout` are noticed too, and are counted separately. A survivor is equivalent
to the original, in a statement that the suite does not execute, or needs a check.

`--json` writes one JSON object per line: the run, each mutant when it is done, and the counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

from tests.testing.mutants import Mutant, mutants_of
from tests.testing.mutation_runs import FORMS, ROOT, Result, Run, measured_lines, run_all

__all__ = ["Candidate", "find_candidates", "main"]

FOLDERS = ("attnlib/ops/torch", "attnlib/backends/torch")
SURVIVES = "survives"


@dataclass
class Candidate:
    """A mutant of a file, and the results of its runs by form.

    Attributes:
        file: path relative to the root of the repository.
        mutant: the change.
        executed: form -> whether the form executes the changed statement.
        results: form -> result; forms that have not run are missing.
    """

    file: str
    mutant: Mutant
    executed: dict[str, bool] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Identifies the mutant in a version of the file."""
        return self.file, self.mutant.line, self.mutant.column, self.mutant.change

    def to_json(self) -> dict[str, Any]:
        """The mutant and its results as plain JSON values."""
        file, line, column, change = self.key
        forms = {
            form: {**result.to_json(), "executed": self.executed.get(form, True)}
            for form, result in self.results.items()
        }
        return {"file": file, "line": line, "column": column, "change": change, **forms}

    def __str__(self) -> str:
        """The mutant and its outcomes in one line."""
        outcomes = "; ".join(
            f"{form}: {result}{'' if self.executed.get(form, True) else ' (not executed)'}"
            for form, result in self.results.items()
        )
        return f"{self.file}:{self.mutant.line}: {self.mutant.change}: {outcomes}"


def find_candidates(pattern: str = "*") -> list[Candidate]:
    """All mutants of the files whose path matches a pattern, in a fixed order."""
    return [
        Candidate(name, mutant)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if fnmatch(name := path.relative_to(ROOT).as_posix(), pattern)
        for mutant in mutants_of(path.read_text(encoding="utf-8"))
    ]


def read_survivors(path: Path, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """The candidates that survived a form in the run that a file describes.

    A mutant whose line has moved is found by its change, if the file has only one such change.
    """
    by_key: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        for key in (candidate.key, (candidate.file, candidate.mutant.change)):
            by_key.setdefault(key, []).append(candidate)
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if SURVIVES not in [one[form]["outcome"] for form in FORMS if form in one]:
            continue
        exact = by_key.get((one["file"], one["line"], one["column"], one["change"]), [])
        found = exact or by_key.get((one["file"], one["change"]), [])
        if len(found) == 1:
            yield found[0]
        else:
            reason = "no such change" if not found else f"{len(found)} such changes"
            print(f"skipped: {one['file']}:{one['line']}: {one['change']} ({reason})")


def run_to_the_end(candidates: Sequence[Candidate], forms: Sequence[str]) -> list[Candidate]:
    """The first of the candidates, up to one that a form has not run. Those behind it that are
    done are not counted: what is done early is noticed more often."""
    return list(takewhile(lambda one: set(forms) <= set(one.results), candidates))


def summarize(candidates: Sequence[Candidate], form: str) -> dict[str, int]:
    """Counts of one form by outcome, and the survivors that the form does not execute."""
    done = [candidate for candidate in candidates if form in candidate.results]
    counts = Counter(candidate.results[form].outcome for candidate in done)
    idle = sum(
        candidate.results[form].outcome == SURVIVES and not candidate.executed.get(form, True)
        for candidate in done
    )
    noticed = len(done) - counts[SURVIVES]
    return {"run": len(done), "noticed": noticed, **counts, "survives_not_executed": idle}


def describe_run(arguments: Sequence[str]) -> dict[str, Any]:
    """Commit, versions and command."""
    import torch

    state = "unknown"
    with suppress(OSError, subprocess.CalledProcessError):
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        state = subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()
    command = " ".join(["python -m tests.testing.mutation", *arguments])
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"command": command, "commit": state, **versions}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    add = parser.add_argument
    add("--sample", type=int, default=20, help="number of mutants, 0 for all (default: 20)")
    add("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    add("--file", default="*", metavar="PATTERN", help="only files whose path matches")
    add("--only", type=Path, metavar="FILE", help="the survivors in a file of --json")
    add("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="forms (default: both)")
    add("--checks", default=None, metavar="FILTER", help="only these checks, as verify --only")
    add("--jobs", type=int, default=1, help="number of processes (default: 1)")
    add("--timeout", type=float, default=180.0, help="seconds for each run (default: 180)")
    add("--limit-s", type=float, default=float("inf"), help="seconds for all runs")
    add("--json", type=Path, metavar="FILE", help="write the results, one JSON object per line")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a random sample of mutants and print each, and the counts."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(given)
    chosen = find_candidates(args.file)
    total = len(chosen)
    if args.only:
        chosen = list(read_survivors(args.only, chosen))
    else:
        # All of them are shuffled too: what `--limit-s` cuts off is a random sample.
        chosen = random.Random(args.seed).sample(chosen, min(args.sample or total, total))
    with suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if args.json is None:
        return _run(chosen, total, args, None, describe_run(given))
    with args.json.open("w", encoding="utf-8", buffering=1) as file:
        return _run(chosen, total, args, file, describe_run(given))


def _run(
    chosen: list[Candidate],
    total: int,
    args: argparse.Namespace,
    file: TextIO | None,
    description: dict[str, Any],
) -> int:
    def write(entry: dict[str, Any]) -> None:
        if file is not None:
            file.write(json.dumps(entry) + "\n")

    write({**description, "sample": len(chosen), "mutants": total})
    for form, (lines, error) in measured_lines(args.forms, args.checks, FOLDERS).items():
        if error:
            print(f"without a change, the {form} form ends with {error}", file=sys.stderr)
            return 2
        for one in chosen:
            first, last = one.mutant.lines
            one.executed[form] = bool(lines.get(one.file, set()) & set(range(first, last + 1)))
    first = "full" if "full" in args.forms else "quick"
    runs = [
        Run(one.file, one.mutant, first, args.checks, args.timeout, results=one.results)
        for one in chosen
    ]

    def following(run: Run) -> Run | None:
        if run.form == "quick" or "quick" not in args.forms:
            return None
        if run.results["full"].outcome == SURVIVES:
            run.results["quick"] = Result(SURVIVES, "as the full form", 0.0)
            return None
        return replace(run, form="quick")

    by_results = {id(one.results): one for one in chosen}
    for run in run_all(runs, args.jobs, args.limit_s, following):
        one = by_results[id(run.results)]
        if len(one.results) == len(args.forms):
            write(one.to_json())
            print(one)
    done = run_to_the_end(chosen, args.forms)
    for form in args.forms:
        counts = summarize(done, form)
        write({"form": form, "sample": len(chosen), **counts})
        print(f"{form}: {counts['noticed']} of {counts['run']} noticed: {counts}")
    if len(done) < len(chosen):
        print(
            f"{len(chosen) - len(done)} mutants of the sample did not run to the end in --limit-s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
