"""Mutants have one change each, none in texts and annotations; the runs of `mutation.py`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.mutants import mutants_of
from tests.testing.mutation import (
    find_candidates,
    read_survivors,
    run_to_the_end,
    summarize,
)
from tests.testing.mutation_report import replaced, report_of
from tests.testing.mutation_runs import ROOT, Result

SOURCE = '''
@cached(size=3)
def f(x: Literal[3], flag=True):
    """Two."""
    if x < 2 and not flag:
        raise ValueError(f"{x + 1}")
    return g.h(x, 4 - x)
'''
STATEMENTS = """
def f(x, mask, out):
    if mask:
        out[0] = x.masked_fill(mask, 0.5)
    g(x, scale=mask)
"""


def test_each_mutant_has_one_change() -> None:
    found = {mutant.change for mutant in mutants_of(SOURCE)}
    assert found == {
        "other boolean: True -> False",
        "and/or: x < 2 and (not flag) -> x < 2 or not flag",
        "dropped condition: x < 2 and (not flag) -> x < 2",
        "comparison: x < 2 -> x <= 2",
        "constant + 1: 2 -> 3",
        "dropped sign or not: not flag -> flag",
        "swapped arguments: g.h(x, 4 - x) -> g.h(4 - x, x)",
        "constant + 1: 4 -> 5",
        "operator: 4 - x -> 4 + x",
        "dropped term: 4 - x -> 4",
    }


def test_mutants_of_statements_and_calls() -> None:
    found = {mutant.change for mutant in mutants_of(STATEMENTS)}
    assert found == {
        "opposite condition: mask -> not mask",
        "removed statement: out[0] = x.masked_fill(mask, 0.5) -> pass",
        "constant + 1: 0 -> 1",
        "removed masked_fill: x.masked_fill(mask, 0.5) -> x",
        "swapped arguments: x.masked_fill(mask, 0.5) -> x.masked_fill(0.5, mask)",
        "other constant: 0.5 -> 1.0",
        "removed statement: g(x, scale=mask) -> pass",
        "dropped scale: g(x, scale=mask) -> g(x)",
    }


@pytest.mark.parametrize("source", [SOURCE, STATEMENTS])
def test_mutants_differ_from_the_source_and_from_each_other(source: str) -> None:
    changed, tree = [], ast.unparse(ast.parse(source))
    for mutant in mutants_of(source):
        with mutant.applied() as module:
            changed.append(ast.unparse(module))
        assert ast.unparse(module) == tree
    assert len({*changed, tree}) == len(changed) + 1


def test_lines_of_a_mutant_are_those_of_its_statement_without_the_body() -> None:
    lines = {mutant.change: mutant.lines for mutant in mutants_of(STATEMENTS)}
    assert lines["opposite condition: mask -> not mask"] == (3, 3)
    assert lines["constant + 1: 0 -> 1"] == (4, 4)


def test_survivors_are_found_again_where_their_line_has_moved(tmp_path: Path) -> None:
    candidates = find_candidates("*softmax.py")
    moved, killed = candidates[0], candidates[1]
    moved.results["quick"] = Result("survives", "", 1.0)
    killed.results["quick"] = Result("check", "W2/causal", 1.0)
    entries = [moved.to_json() | {"line": 10_000}, killed.to_json(), {"form": "quick"}]
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in entries))
    assert [one.key for one in read_survivors(file, candidates)] == [moved.key]


def test_counts_of_a_form() -> None:
    candidates = find_candidates("*softmax.py")[:4]
    outcomes = ("check", "survives", "timeout", "survives")
    for one, outcome in zip(candidates, outcomes, strict=True):
        one.results["full"] = Result(outcome, "", 1.0)
    candidates[1].executed["full"] = False
    assert summarize(candidates, "full") == {
        "run": 4, "noticed": 2, "check": 1, "timeout": 1, "survives": 2,
        "survives_not_executed": 1,
    }  # fmt: skip
    assert summarize(candidates, "quick")["run"] == 0
    del candidates[2].results["full"]
    assert run_to_the_end(candidates, ["full"]) == candidates[:2]


@pytest.mark.slow
def test_the_script_writes_a_line_for_each_mutant(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    options = ["--sample", "3", "--file", "*/mask.py", "--checks", "W2"]
    command = [sys.executable, "-m", "tests.testing.mutation", *options, "--json", str(file)]
    subprocess.run(command, cwd=ROOT, check=True)
    run, *mutants, full, counts = [json.loads(line) for line in file.read_text().splitlines()]
    assert run["sample"] == len(mutants) == counts["run"] == 3
    noticed = [one for one in mutants if one["quick"]["outcome"] != "survives"]
    assert len(noticed) == counts["noticed"] > 0
    assert full["noticed"] >= counts["noticed"]


def test_scores_leave_out_equivalent_mutants_only() -> None:
    """A survivor without a reason, and one that is unreachable, count as not noticed."""
    candidates = find_candidates("*softmax.py")[:4]
    for one, outcome in zip(candidates, ("check", "survives", "survives", "crash"), strict=True):
        one.results = {form: Result(outcome, "", 1.0) for form in ("full", "quick")}
    candidates[3].results["quick"] = Result("survives", "", 1.0)
    same, other = candidates[1:3]
    lines = (ROOT / same.file).read_text().splitlines()
    key = (same.file, same.mutant.change, lines[same.mutant.line - 1].strip())
    entries = [{"commit": "x"}, *(one.to_json() for one in candidates)]

    def read(_commit: str, file: str) -> list[str]:
        return (ROOT / file).read_text().splitlines()

    report = report_of(entries, {key: ["equivalent", "why"]}, read)
    full, quick = report["forms"]["full"], report["forms"]["quick"]
    assert (full["noticed"], full["equivalent"], full["noticed_percent"]) == (2, 1, 66.7)
    assert (quick["noticed"], quick["equivalent"], quick["noticed_percent"]) == (1, 1, 33.3)
    kinds = [one["kind"] for one in report["survivors"]]
    assert kinds == ["equivalent", "unexplained", "unexplained"]
    assert report["survivors"][1]["line"] == other.mutant.line
    again = json.loads(json.dumps(entries[3]))  # a later run, which notices the second survivor
    again["full"]["outcome"] = again["quick"]["outcome"] = "check"
    report = report_of(replaced(entries, [again]), {key: ["equivalent", "why"]}, read)
    assert report["forms"]["full"]["noticed_percent"] == 100.0
    assert report["forms"]["quick"]["noticed_percent"] == 66.7
