"""The script that runs commands side by side on the GPUs of a machine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import schedule
from benchmarks.gpu.schedule import Job, read_jobs, run_jobs

MEET = """
import os, pathlib
(pathlib.Path(os.environ["OUT"]) / "{mine}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
with open(os.environ["OUT"] + "/pipe", "{mode}"):  # waits for the other one
    pass
"""


def _python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def _states(results: list[dict[str, Any]]) -> dict[str, str]:
    return {result["name"]: result["state"] for result in results}


def test_a_job_that_hangs_or_fails_does_not_affect_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "hangs.txt"

    def monotonic() -> float:
        """The time of a job that hangs is over as soon as it has begun."""
        began = output.exists() and "began" in output.read_text().splitlines()
        return time.monotonic() + (1000.0 if began else 0.0)

    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    hangs = "import signal; print('began', flush=True); signal.pause()"
    jobs = [
        Job("hangs", None, 900, _python(hangs)),
        Job("fails", None, 900, "exit 3"),
        Job("passes", None, 900, "echo out $OUT"),
    ]
    results = run_jobs(jobs, tmp_path)
    expected = {"hangs": "stopped after 900 s", "fails": "failed, exit 3", "passes": "passed"}
    assert _states(results) == expected
    assert (tmp_path / "passes.txt").read_text() == f"# echo out $OUT\nout {tmp_path}\n"
    assert results[-1]["tail"][-1] == f"out {tmp_path}"


@pytest.mark.parametrize(("gpus", "seen"), [(1, {"0", "3"}), (0.5, {"0"})])
def test_jobs_run_at_once_where_their_gpus_are_free(
    gpus: float, seen: set[str], tmp_path: Path
) -> None:
    """Two jobs that wait for each other pass: on two GPUs, or as halves of one."""
    os.mkfifo(tmp_path / "pipe")
    jobs = [
        Job("both", 2, 60, "test $CUDA_VISIBLE_DEVICES = 0,3"),
        Job("reads", gpus, 60, _python(MEET.format(mine="a", mode="r"))),
        Job("writes", gpus, 60, _python(MEET.format(mine="b", mode="w"))),
    ]
    assert set(_states(run_jobs(jobs, tmp_path, devices=["0", "3"])).values()) == {"passed"}
    assert {(tmp_path / name).read_text() for name in "ab"} == seen


def test_a_job_alone_and_a_job_after_another_wait(tmp_path: Path) -> None:
    jobs = [
        Job("last", 0, 60, "test -e $OUT/middle", after="middle"),
        Job("first", 1, 60, "touch $OUT/first"),
        Job("middle", None, 60, "test -e $OUT/first && touch $OUT/middle"),
    ]
    results = run_jobs(jobs, tmp_path, devices=["0"])
    assert list(_states(results)) == ["first", "middle", "last"]
    assert set(_states(results).values()) == {"passed"}


def test_jobs_without_time_or_gpus(tmp_path: Path) -> None:
    jobs = [Job("one", 2, 60, "true")]
    with pytest.raises(ValueError, match="a job needs 2 GPUs, and 1 are given"):
        run_jobs(jobs, tmp_path, devices=["0"])
    results = run_jobs(jobs, tmp_path, devices=["0", "1"], seconds=5)
    assert _states(results) == {"one": "not run: no time"}


def test_files_of_jobs() -> None:
    text = "# comment\n\nverify | 0.5 | 250 | attnlib verify triton | tail\nrows|alone|60|true\n"
    assert read_jobs(text) == [
        Job("verify", 0.5, 250, "attnlib verify triton | tail"), Job("rows", None, 60, "true")
    ]  # fmt: skip
    with pytest.raises(ValueError, match="line 1: 'verify' is not NAME"):
        read_jobs("verify")
