"""Samples the parameters of every selected test, runs it, and classifies the outcome."""

from __future__ import annotations

import ast
import gc
import math
import random
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

from attnlib.errors import UnsupportedConfigError
from benchmarks.upstream_tests.rewrite import checks_gradients_only, rewrite
from benchmarks.upstream_tests.shims import NotProvidedError, pretend_to_be_hopper

__all__ = ["Outcome", "line_of", "run_module"]


@dataclass
class Outcome:
    """The result of one test function.

    Attributes:
        test: file and function.
        cases: combinations of its parameters.
        excluded: of these, too large for the device.
        counts: cases run, by outcome: passed, refused, skipped (by the test), wrong, not finished.
        reasons: of refusals and skips, with numbers.
        wrong: parameters and error of each wrong case.
        note: why nothing was run.
    """

    test: str
    cases: int = 0
    excluded: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    note: str = ""


def run_module(
    path: Path, mentions: tuple[str, ...], options: Any, skipped: dict[str, str]
) -> list[Outcome]:
    """Run the tests of one file.

    Args:
        path: of the file.
        mentions: a test is selected if its source has one of these names.
        options: `device`, `sample` (cases per function), `seed`, `only` (parts of names of tests;
            None for all), `largest` (the largest integer parameter), `seconds` (the limit of one
            case), `shard` of `shards`, and `end` (when no new case is started) of the command line.
        skipped: parts of names of tests that are not run, with the reason.
    """
    tree = rewrite(path.read_text(), options.device)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    with pretend_to_be_hopper(options.device):
        module = ModuleType(path.stem)
        exec(compile(tree, str(path), "exec"), vars(module))
        found = []
        for function in functions:
            chosen = options.only is None or any(x in function.name for x in options.only)
            if function.name.startswith("test_") and chosen:
                found.append(_run_function(path, module, function, mentions, options, skipped))
                print(line_of(found[-1]), flush=True)
    return found


def line_of(outcome: Outcome) -> str:
    """One line with the counts of a test."""
    counts = ", ".join(f"{number} {name}" for name, number in sorted(outcome.counts.items()))
    return f"{outcome.test}: {outcome.cases} cases: {counts or outcome.note}"


def _run_function(
    path: Path,
    module: ModuleType,
    function: ast.FunctionDef,
    mentions: tuple[str, ...],
    options: Any,
    skipped: dict[str, str],
) -> Outcome:
    outcome = Outcome(f"{path.name}::{function.name}")
    source = ast.unparse(function)
    call = getattr(module, function.name)
    marks = getattr(call, "pytestmark", [])
    names = [mark.args for mark in marks if mark.name == "parametrize"]
    outcome.cases = math.prod(len(list(values)) for _, values in names)
    if not any(name in source for name in mentions):
        outcome.note = "tests other functions"
    elif reason := next((skipped[part] for part in skipped if part in function.name), ""):
        outcome.note = reason
    elif any(mark.name == "skipif" and mark.args[0] for mark in marks):
        outcome.note = "skipped by the test"
    elif checks_gradients_only(function, path.read_text()):
        outcome.note = "checks the backward pass only"
    if outcome.note:
        return outcome
    rng = random.Random(f"{options.seed} {outcome.test}")
    for number, case in enumerate(_sample(names, outcome, options, rng)):
        if number % options.shards != options.shard:
            continue
        if time.monotonic() > options.end:
            outcome.counts["no time left"] += 1
            continue
        _run_case(call, case, outcome, options)
    return outcome


def _sample(
    names: list[tuple[Any, Any]], outcome: Outcome, options: Any, rng: random.Random
) -> list[dict[str, Any]]:
    """Random combinations without repetition, none with an integer above `largest`."""
    axes = []
    for name, values in names:
        keys = [key.strip() for key in name.split(",")] if isinstance(name, str) else list(name)
        axis = [
            dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values
        ]
        axes.append(
            [
                choice
                for choice in axis
                if all(type(x) is not int or x <= options.largest for x in choice.values())
            ]
        )
    total = math.prod(len(axis) for axis in axes)
    outcome.excluded = outcome.cases - total
    chosen = rng.sample(range(total), min(options.sample, total))
    cases = []
    for number in chosen:
        case: dict[str, Any] = {}
        for axis in axes:
            number, index = divmod(number, len(axis))
            case |= axis[index]
        cases.append(case)
    return cases


class _TooLong(BaseException):
    pass


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _TooLong


def _run_case(call: Any, case: dict[str, Any], outcome: Outcome, options: Any) -> None:
    torch.manual_seed(0)
    signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(options.seconds)
    started, silent = time.monotonic(), _Silence()
    try:
        with torch.no_grad(), silent:
            call(**case)
        name = "passed"
    except UnsupportedConfigError as error:
        name = "refused"
        outcome.reasons[f"refused: {str(error)[:160]}"] += 1
    except NotProvidedError as error:
        name = "refused"
        outcome.reasons[f"refused: {error}"] += 1
    except (pytest.skip.Exception, pytest.xfail.Exception) as error:
        name = "skipped"
        outcome.reasons[f"skipped by the test: {error.msg}"] += 1
    except _TooLong:
        name = "not finished"
        outcome.reasons[f"not finished in {options.seconds} s"] += 1
    except torch.OutOfMemoryError:
        name = "not finished"
        outcome.reasons["not finished: out of memory"] += 1
    except (Exception, pytest.fail.Exception) as error:
        name = "wrong"
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{case}: {type(error).__name__}: {str(error)[:400]} ({place.name}:{place.lineno})"
        outcome.wrong.append(text)
        print("WRONG", outcome.test, text, file=sys.stderr, flush=True)
    finally:
        signal.alarm(0)
    outcome.counts[name] += 1
    if options.device == "cuda" or time.monotonic() - started > 1:
        gc.collect()  # layers are parts of reference cycles, and hold workspaces


class _Silence:
    """Standard output is dropped: the tests print their errors."""

    def __enter__(self) -> None:
        self._stdout, sys.stdout = sys.stdout, open("/dev/null", "w")  # noqa: SIM115  # __exit__

    def __exit__(self, *_: Any) -> None:
        sys.stdout.close()
        sys.stdout = self._stdout
