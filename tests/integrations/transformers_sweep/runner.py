"""Runs architectures in worker processes, many in each, with a time limit."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.integrations.transformers_sweep.architectures import Architecture

__all__ = ["read_records", "sweep"]


class _Worker:
    """A worker process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.transformers_sweep.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, one: Architecture, seconds: float) -> dict[str, Any]:
        """The record of one architecture.

        Raises:
            TimeoutError: it takes longer than `seconds`.
            EOFError: the process died.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(one) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"took longer than {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EOFError("the worker process died")
        record: dict[str, Any] = json.loads(line)
        return record

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def sweep(
    chosen: list[Architecture],
    processes: int,
    seconds: float,
    facts: dict[str, Any],
    path: Path | None = None,
    until: float = float("inf"),
) -> list[dict[str, Any]]:
    """The records of the architectures, in their order.

    Args:
        chosen: the architectures.
        processes: number of worker processes.
        seconds: limit for one architecture.
        facts: fields that every record gets.
        path: file of JSON lines, to which each record is appended when it is complete.
        until: value of `time.perf_counter()` after which no architecture starts.
    """
    records: dict[Architecture, dict[str, Any]] = {}
    waiting, lock = list(reversed(chosen)), threading.Lock()

    def work() -> None:
        worker = _Worker()
        while True:
            with lock:
                if not waiting or time.perf_counter() > until:
                    break
                one = waiting.pop()
            try:
                record = worker.run(one, seconds)
            except (TimeoutError, EOFError) as error:
                worker.close()
                worker = _Worker()
                record = _failed(one, error, seconds)
            with lock:
                records[one] = {**record, **facts}
                _show(records[one], f"{len(records)}/{len(chosen)}")
                if path is not None:
                    with path.open("a") as lines:
                        lines.write(json.dumps(records[one], sort_keys=True) + "\n")
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [records[one] for one in chosen if one in records]


def read_records(path: Path) -> dict[Architecture, dict[str, Any]]:
    """The latest record of each architecture in a file of JSON lines."""
    found: dict[Architecture, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        found[Architecture(record["kind"], record["model_type"], record["class"])] = record
    return found


def _failed(one: Architecture, error: Exception, seconds: float) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "model_type": one.model_type,
        "class": one.class_name,
        "outcome": "not run" if isinstance(error, TimeoutError) else "crash",
        "reason": str(error),
        "cases": {},
        "seconds": seconds,
    }


def _show(record: dict[str, Any], progress: str) -> None:
    name = f"{record['kind']} {record['model_type']}"
    reason = record["reason"] or record.get("note", "")
    print(f"{progress} {name}: {record['outcome']} {record['seconds']} s {reason}", flush=True)
    for label, case in record["cases"].items():
        if case["outcome"] in ("wrong", "crash", "refused"):
            print(f"    {label}: {case['outcome']}: {case['reason']}", flush=True)
