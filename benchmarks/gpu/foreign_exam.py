"""Everything that a GPU machine has to show of the foreign kernels, in one command; each part has a time limit and a file of its own under $OUT.

    python benchmarks/gpu/foreign_exam.py                                   # all parts
    python benchmarks/gpu/foreign_exam.py --parts verify:flashinfer parity
    python benchmarks/gpu/foreign_exam.py --parts verify:flash_attn parity --label fa4
    python benchmarks/gpu/foreign_exam.py --limit-seconds 560 --part-seconds 300

Parts: `pytest` (the tests that need a GPU), `verify:<backend>` (the whole exam, text and JSON), `parity` (every backend writes, every other
reads: the matrix of largest differences, text and JSON). A part that fails, hangs or crashes costs its own time and the next one runs. Output goes to
`<part>[_label].txt` as it comes, so that a killed run keeps what it found; `foreign_exam.json` says how each part ended, with its provenance.

FlashInfer compiles at first use: run flashinfer_kernels.py before this. FlashAttention 4 compiles too, and keeps what it compiled for other processes
when FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1, which is set here unless the environment says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

PARTS = ["verify:flashinfer", "verify:flash_attn", "verify:triton", "parity", "pytest"]
TAIL_LINES = 14


def command_of(part: str, stem: Path, backends: list[str]) -> list[str]:
    """What runs for a part; JSON goes beside the text."""
    kind, _, backend = part.partition(":")
    if kind == "pytest":
        return [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-ra"]
    if kind == "verify" and backend:
        return [sys.executable, "-m", "attnlib", "verify", backend, "--json", f"{stem}.json"]
    if kind == "parity":
        return [sys.executable, "-m", "attnlib", "parity", *backends, "--json", f"{stem}.json"]
    raise ValueError(f"unknown part {part!r}: pytest, verify:<backend> or parity")


def environment() -> dict[str, str]:
    """The caller's, with the checkout importable and FlashAttention 4's kernels kept between processes."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [found.get("PYTHONPATH", ""), str(ROOT)]))
    found.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    found["PYTHONUNBUFFERED"] = "1"
    return found


def run_part(part: str, stem: Path, seconds: float, backends: list[str]) -> dict[str, Any]:
    """Run one part; its whole output is in `stem`.txt, and its end in the result."""
    began = time.monotonic()
    text = Path(f"{stem}.txt")
    with text.open("w") as sink:
        command = command_of(part, stem, backends)
        sink.write(f"# {' '.join(command[1:])}\n")
        sink.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = text.read_text(errors="replace").splitlines()
    state = (
        "passed"
        if code == 0
        else f"stopped after {seconds:.0f} s"
        if code is None
        else f"failed, exit {code}"
    )
    return {
        "part": part,
        "state": state,
        "seconds": round(time.monotonic() - began, 1),
        "tail": lines[-TAIL_LINES:],
    }


def save(results: list[dict[str, Any]], folder: Path) -> None:
    from provenance import provenance

    (folder / "foreign_exam.json").write_text(
        json.dumps({"provenance": provenance(), "parts": results}, indent=1)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=PARTS)
    parser.add_argument(
        "--backends",
        nargs="*",
        default=["triton", "flash_attn", "flashinfer", "torch"],
        help="for parity",
    )
    parser.add_argument(
        "--label", default="", help="added to the names of the files, such as fa3 or fa4"
    )
    parser.add_argument("--part-seconds", type=float, default=330.0)
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=580.0,
        help="for everything; parts that would start later are left out",
    )
    options = parser.parse_args()
    folder = Path(os.environ.get("OUT", ".")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit_seconds
    results: list[dict[str, Any]] = []
    for part in options.parts:
        left = end - time.monotonic()
        name = "_".join(filter(None, [part.replace(":", "_"), options.label]))
        if left < 10:
            results.append({"part": part, "state": "left out: no time", "seconds": 0.0, "tail": []})
        else:
            print(f"{part} ...", flush=True)
            results.append(
                run_part(part, folder / name, min(left, options.part_seconds), options.backends)
            )
        print(
            "\n    ".join(
                [
                    f"{part}: {results[-1]['state']} ({results[-1]['seconds']:.0f} s)",
                    *results[-1]["tail"],
                ]
            ),
            flush=True,
        )
        save(results, folder)
    return 0 if all(result["state"] == "passed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
