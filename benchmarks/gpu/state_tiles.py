"""Tiles of the kernels of state layers: which value rows, warps and registers are the fastest?

    python -m benchmarks.gpu.state_tiles --out state_tiles.json --limit-seconds 60
    python -m benchmarks.gpu.state_tiles 'qwen3-next-decode-*' --choices 64x8:128 64x4

A choice ROWSxWARPS[:REGISTERS][/STAGES][+GROUP] takes the place of those of
`ops.triton.heuristics.state_tiles.TILES`, with C before it (16C64x8) for the columns of the keys
that are multiplied at a time, with w behind it for decodes of a whole head in one program, R in
front for row decodes, which load GROUP rows of the tail at a time; M for those whose states go
through shared memory. Prefills of all but the shipped choice are in chunks of the slots.
Processes compile the kernels first, side by side. Each row is a case of
`attnlib bench --suite states`: times are medians of replays of CUDA graphs, in turn, over all
positions of a chunk. `share` is the part of the bandwidth of a copy that the bytes of the case
reach; `equal` says whether the bits are those of the first choice, which columns, R and chunks may
change. `difference` and `states`, for few requests, are the largest ones of the outputs of all
calls and of the states after them, to the largest value of the first choice.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import copy as copied
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch

from attnlib.backends.triton import TritonBackend
from attnlib.bench.backends import BenchBackend
from attnlib.bench.peaks import Peaks, measure_peaks
from attnlib.bench.state_case import MODELS, StateCase
from attnlib.bench.state_runner import StateRunner
from attnlib.bench.timer import EagerTimer, GraphTimer, measure_in_turn, warm_up
from attnlib.layer import StateLayer
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.state_tiles import StateChoice
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.states.config import state_config
from benchmarks.gpu import rows

SHIPPED, ROW, COPIED = "shipped", "R", "M"
STEPS = ("64x8:128", "64x4:168", "32x2:168", "32x4w", "32x4:168w", "32x4:128w", "64C32x4:168w",
         "128C32x4w", "64x4w", "16x4:128w", "16x2:168w", "32x2w", "R128x4:168+4", "R128x4:168+2",
         "R128x8:128+4", "R64x2:168+4", "R64x4:128+4", "R32x4+16", "M64x2+4",
         "M128x4+4", "M64x4+4", "M32x2+4")  # fmt: skip
PREFILLS = ("64x8", "64x8/2", "64x8:128/2", "64x4", "64x4/2", "32x4", "32x4/2", "32x4:128/2",
            "32x2/2", "32x2/3")  # fmt: skip
WORK = {"decode": ((32, 1), (256, 1), (1, 1)), "verify": ((64, 4),),
        "prefill": ((1, 8192), (8, 1024))}  # fmt: skip
"""Work -> requests and tokens of each."""

CASES = {
    case.name: case
    for work, sizes in WORK.items()
    for model in MODELS
    for case in (StateCase(model=model, work=work, num_reqs=n, query_len=q) for n, q in sizes)
}
MOST_COMPARED = 32
"""Most requests of a case whose values are compared."""
MANY_REQUESTS = 16
"""Requests whose heads fill the chip in all models, so that their kernels are those of more."""
_CHOICE = re.compile(r"(?:(\d+)C)?(\d+)x(\d+)(?::(\d+))?(?:/(\d+))?(?:\+(\d+))?(w?)")


def parse(name: str) -> tuple[int, StateChoice]:
    """(columns of keys, choice) of a name such as `32x4:128`."""
    found = _CHOICE.fullmatch(name[name[0] in ROW + COPIED :])
    if found is None:
        raise ValueError(
            f"choice {name!r}; the form is [R|M]ROWSxWARPS[:REGISTERS][/STAGES][+GROUP][w]"
        )
    *numbers, ending = found.groups()
    columns, size, warps, registers, stages, group = (int(each or 0) for each in numbers)
    is_copied = name[0] == COPIED
    choice = StateChoice(size, warps, registers, stages or 1, ending == "w", group, is_copied)
    return columns or state_tiles.MOST_COLUMNS, choice


def choices(case: StateCase, given: list[str] | None) -> list[str]:
    """The names of the choices for a case, the shipped one first."""
    return [SHIPPED, *(given or (PREFILLS if case.work == "prefill" else STEPS))]


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """Inside, kernels have the tiles of a choice."""
    given: dict[str, Any] = {}
    if name != SHIPPED:
        columns, choice = parse(name)
        given = {"TILES": dict.fromkeys(state_tiles.TILES, choice), "MOST_COLUMNS": columns}
        given["LONG_CHUNK"] = 0
    with patch.multiple(state_tiles, **given) if given else nullcontext():
        state_config.cache_clear()  # neither key names a tile
        LAUNCHES.clear()
        try:
            yield
        finally:
            state_config.cache_clear()
            LAUNCHES.clear()


def device() -> torch.device:
    """Where the cases run; the CPU is for a dry run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(case: StateCase) -> StateRunner:
    """The slots and inputs of a case."""
    return StateRunner(case, BenchBackend("triton", TritonBackend), device())


def bound(runner: StateRunner) -> StateRunner:
    """The same slots and inputs with a layer that has launched nothing; compiles its kernels."""
    for batch in runner.batches:
        batch.plans.clear()
    spec = runner.layer.spec
    one = copied(runner)
    one.layer = StateLayer(spec, backend=TritonBackend, device=device())
    one.first_calls()
    one.attend(0)
    return one


def compile_one(job: tuple[str, StateCase]) -> None:
    """Compile the kernels of a choice."""
    name, case = job
    with chosen(name):
        runner = make(case)
        runner.attend(0)


def smaller(cases: list[StateCase]) -> list[StateCase]:
    """Cases of less work with the kernels of these."""
    found = [
        replace(
            case,
            num_reqs=min(case.num_reqs, MANY_REQUESTS),
            query_len=min(case.query_len, 64),
        )
        for case in cases
    ]
    return list(dict.fromkeys(found))


def compile_all(cases: list[StateCase], given: list[str] | None) -> None:
    """Fill the cache of Triton in one process for each of the CPU cores."""
    jobs = [(name, case) for case in smaller(cases) for name in choices(case, given)]
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(cores, len(jobs), 12), context) as pool:
        # A choice that does not compile is an error of its row, too.
        for job, future in [(job, pool.submit(compile_one, job)) for job in jobs]:
            if error := future.exception():
                print(f"{job[0]} {job[1].name}: {error!r}"[:300], file=sys.stderr, flush=True)


@dataclass
class Values:
    """The slots of a case before its calls, None if they are not compared, and outputs and states
    of the first choice."""

    memory: torch.Tensor | None
    wanted: list[torch.Tensor] | None = None

    @classmethod
    def of(cls, runner: StateRunner) -> Values:
        few = runner.case.num_reqs <= MOST_COMPARED
        return cls(runner.cache.memory.clone() if few else None)

    def differences(self, one: StateRunner) -> dict[str, float]:
        """Those of another choice."""
        if self.memory is None:
            return {}
        one.cache.memory.copy_(self.memory)
        outputs = []
        for copy in range(one.copies):
            one.attend(copy)
            outputs.append(one.output.float())
        state = one.cache.tensors.state
        assert state is not None  # a recurrence has one
        found = [torch.stack(outputs), state.float().clone()]
        self.wanted = self.wanted or found
        output, state = zip(found, self.wanted, strict=True)
        # What no call writes may be anything.
        written = state[0].isfinite() | state[1].isfinite()
        return {
            "difference": _largest_error(*output),
            "states": _largest_error(*(each[written] for each in state)),
        }


def _largest_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if torch.equal(found, wanted):
        return 0.0
    error: float = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return error


@cache
def peaks() -> Peaks:
    """Of this run."""
    return measure_peaks(device())


def measure(name: str, given: list[str] | None = None) -> dict[str, Any]:
    """Times of all choices for one case."""
    runner = make(CASES[name])
    values = Values.of(runner)
    where, first = device(), None
    timers: dict[str, Any] = {}
    expected: dict[str, float] = {}
    found: dict[str, Any] = {}
    for choice in choices(CASES[name], given):
        try:
            with chosen(choice):
                one = bound(runner)
                first = one.output.clone() if first is None else first
                found[choice] = {"equal": torch.equal(one.output, first)}
                found[choice] |= values.differences(one)
                us = warm_up(one.attend, where)
                kind = GraphTimer if where.type == "cuda" else EagerTimer
                timers[choice] = kind(one.attend, one.copies, where, us)
                expected[choice] = us
        except Exception as error:  # a choice that does not fit the chip
            found[choice] = {"error": f"{type(error).__name__}: {error}"[:200]}
    for choice, time in measure_in_turn(timers, expected).items():
        gbps = runner.bytes_per_call / time.us / 1e3
        share = round(gbps / peaks().copy_gbps, 4)
        found[choice] |= {"us": round(time.us, 2), "high": round(time.high, 2), "share": share}
    return {"fastest": fastest(found), "choices": found}


def fastest(found: Mapping[str, Any]) -> str | None:
    """The choice with the least time."""
    times = {choice: one["us"] for choice, one in found.items() if "us" in one}
    return min(times, key=lambda choice: times[choice]) if times else None


def main() -> int:
    parser = rows.parser(__doc__)
    parser.add_argument("--choices", nargs="*", help="instead of those of the script")
    parser.add_argument("--compiled", action="store_true", help="the kernels are in the cache")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if not options.list:
        for name in options.choices or ():
            parse(name)
        names = rows.choose(CASES, options.rows)
        if not options.compiled:
            compile_all([CASES[name] for name in names], options.choices)
        print(json.dumps(peaks().to_json()), flush=True)
    return rows.run(options, CASES, partial(measure, given=options.choices))


if __name__ == "__main__":
    sys.exit(main())
