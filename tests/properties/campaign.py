"""Many draws in several processes: what agreed, what was refused, and every disagreement."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.properties.draw import Limits, draw_of

__all__ = ["Campaign", "Summary", "run_campaign"]

_MOST_REPORTED = 20


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What to run.

    Attributes:
        backend: a name or a pair of names.
        device: "cpu" or "cuda".
        seed: the first seed; the draws have consecutive seeds.
        draws: number of seeds.
        draws_per_spec: consecutive seeds that share a spec.
        forms_per_spec: combinations of layouts for each spec; 0 for any.
        processes: number of worker processes; 1 runs in this process.
        seconds: draws that have not begun after this time are left out; None for no limit.
        commit: commit of attnlib for the report; None asks git.
    """

    backend: str
    device: str = "cpu"
    seed: int = 0
    draws: int = 100
    draws_per_spec: int = 1
    forms_per_spec: int = 0
    processes: int = 1
    seconds: float | None = None
    commit: str | None = None

    @property
    def limits(self) -> Limits:
        """The draws that the backend can run on the device."""
        if self.backend == "torch":
            return Limits()
        if self.device == "cpu":  # Triton's interpreter: no bfloat16, and slow
            return Limits(
                dtypes=("float32", "float16"),
                longest=60,
                longest_query=24,
                most_heads=12,
                most_requests=3,
                repeated=0.25,
                rare=0.01,
            )
        dtypes = ("bfloat16", "bfloat16", "float16", "float32")
        return Limits(
            dtypes=dtypes, longest=2000, longest_query=150, rare=0.01,
            forms_per_spec=self.forms_per_spec,
        )  # fmt: skip

    def reproduce(self, seed: int) -> str:
        """The command that repeats one draw."""
        shared = f" --draws-per-spec {self.draws_per_spec}" if self.draws_per_spec > 1 else ""
        shared += f" --draw-forms {self.forms_per_spec}" if self.forms_per_spec else ""
        return (
            f"pytest tests/properties/test_attention.py --draws 1 --draw-seed {seed} "
            f"--draw-backend {self.backend} --draw-device {self.device}{shared}"
        )


@dataclass
class Summary:
    """The results.

    Attributes:
        agreed: draws without a disagreement.
        refused: draws whose spec the backend refused with reasons.
        wrong: one text per disagreement, with the command that repeats it.
        not_run: draws left out because the time was over.
        largest_share: largest error as a share of its bound, and the seed of that draw.
        by_dtype: draws that agreed, by dtype of q and dtype of the cache.
        seconds: run time.
    """

    agreed: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    not_run: int = 0
    largest_share: tuple[float, int] = (0.0, -1)
    by_dtype: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, other: Summary) -> None:
        """Add the results of other draws."""
        self.agreed += other.agreed
        self.refused += other.refused
        self.not_run += other.not_run
        self.wrong += other.wrong
        self.largest_share = max(self.largest_share, other.largest_share)
        for name, count in other.by_dtype.items():
            self.by_dtype[name] = self.by_dtype.get(name, 0) + count


def run_campaign(campaign: Campaign, report: Path | None = None) -> Summary:
    """Run all draws; stop after some disagreements.

    Args:
        campaign: what to run.
        report: JSON file for the result.
    """
    start = time.monotonic()
    deadline = None if campaign.seconds is None else time.time() + campaign.seconds
    chunks = _chunks(campaign)
    total = Summary()
    if campaign.processes == 1:
        for chunk in chunks:
            total.add(_run_chunk(campaign, chunk, deadline))
            if len(total.wrong) >= _MOST_REPORTED:
                break
    else:
        _run_in_processes(campaign, chunks, deadline, total)
    total.seconds = round(time.monotonic() - start, 1)
    if report is not None:
        _write(report, campaign, total)
    return total


def _run_in_processes(
    campaign: Campaign, chunks: list[range], deadline: float | None, total: Summary
) -> None:
    """Run chunks in worker processes. A draw that ends its process is a disagreement."""
    context = multiprocessing.get_context("spawn")
    current = context.Array("q", campaign.processes)
    numbers = context.Value("i", 0)
    pool = ProcessPoolExecutor(
        campaign.processes, context, initializer=_begin_worker, initargs=(current, numbers)
    )
    running = [pool.submit(_run_chunk, campaign, chunk, deadline) for chunk in chunks]
    try:
        for done in as_completed(running):
            total.add(done.result())
            if len(total.wrong) >= _MOST_REPORTED:
                break
    except BrokenProcessPool:
        total.wrong.append(f"a process died; the draws that ran had the seeds {list(current)}")
    finally:
        pool.shutdown(cancel_futures=True)


_current: Any = None
_number = 0


def _begin_worker(current: Any, numbers: Any) -> None:
    """Set up a worker: it states its seed in `current`, for the message after a crash."""
    global _current, _number
    faulthandler.enable()
    torch.set_num_threads(1)
    with numbers.get_lock():
        _number = numbers.value
        numbers.value += 1
    _current = current


def _chunks(campaign: Campaign) -> list[range]:
    """Ranges of seeds; draws that share a spec are in one range."""
    shared = campaign.draws_per_spec
    size = shared * max(1, 100 // shared) if campaign.processes > 1 else shared
    end = campaign.seed + campaign.draws
    starts = [campaign.seed, *range((campaign.seed // size + 1) * size, end, size)]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], end], strict=True)]


def _run_chunk(campaign: Campaign, seeds: range, deadline: float | None) -> Summary:
    from tests.properties.check import run_draw

    found = Summary()
    for seed in seeds:
        if deadline is not None and time.time() > deadline:
            found.not_run += 1
            continue
        if _current is not None:
            _current[_number] = seed
        draw = draw_of(seed, campaign.limits, campaign.draws_per_spec)
        try:
            outcome = run_draw(draw, campaign.backend, campaign.device)
            problems, refused, share = outcome.wrong, outcome.refused, outcome.share
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
            problems = [f"{type(error).__name__} in {where}: {error}"]
            refused, share = "", 0.0
        if problems:
            text = f"{'; '.join(problems[:3])}\n  reproduce: {campaign.reproduce(seed)}\n  {draw}"
            found.wrong.append(text)
            if len(found.wrong) >= _MOST_REPORTED:
                break
        elif refused:
            found.refused += 1
        else:
            found.agreed += 1
            name = f"{draw.spec.dtype}, cache {draw.spec.kv_dtype}".replace("torch.", "")
            found.by_dtype[name] = found.by_dtype.get(name, 0) + 1
            found.largest_share = max(found.largest_share, (share, seed))
    return found


def _write(report: Path, campaign: Campaign, total: Summary) -> None:
    from attnlib.bench.provenance import provenance

    seeds = f"{campaign.seed} to {campaign.seed + campaign.draws - 1}"
    command = campaign.reproduce(campaign.seed).replace("--draws 1 ", f"--draws {campaign.draws} ")
    facts: dict[str, Any] = {
        "provenance": provenance(
            command=f"{command} --draw-processes {campaign.processes}", commit=campaign.commit
        ),
        "campaign": asdict(campaign),
        "seeds": seeds,
        "result": asdict(total),
    }
    report.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
