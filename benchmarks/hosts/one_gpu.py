"""Everything that is measured under vLLM on one GPU, one engine after the other.

    python -m benchmarks.hosts.one_gpu --list
    python -m benchmarks.hosts.one_gpu --out one_gpu.json --limit-seconds 560
    python -m benchmarks.hosts.one_gpu 'start-*' 'fp8/*' --out one_gpu.json

Rows named NAME/attnlib and NAME/flash are the same engine with attnlib and with vLLM's own backend,
each in a process of its own. `start-empty` starts without compiled kernels and `start-full` with
those of earlier rows, whose cache is in the folder of --out; all rows but `start-empty` use that
cache and ATTNLIB_KERNELS, if it is set. `start-shipped` has only the latter. Those of `start-empty`
and `start-shipped` are empty folders, which nothing else uses. `start-parts` also writes what its
start spends its time on, and `profile` rows the times of kernels, beside the logs. A row in which
vLLM's monitor saw a new kernel of attnlib while it served has an error. Each row has a time limit.
Several calls, one for each GPU, may share --triton-cache. `int4` needs vLLM 0.33.

Beside --out, NAME.jsonl has what rows have measured so far, and NAME.logs their output: a row that
is stopped keeps its workloads, and its error says where it was (`watch.py`). `token` rows compare
tokens of tiny models instead of times (`vllm_gpu_cases.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import rows
from benchmarks.hosts.watch import SIGNAL, where

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests" / "hosts"
PACKAGE = HERE.parents[1] / "attnlib"
BACKENDS = {"attnlib": "CUSTOM", "flash": "FLASH_ATTN"}
FREE = 0.91
"""Share of the GPU's memory that must be free before an engine starts."""
_DUMP_SECONDS = 2.0
"""In which a process writes the stacks of its threads."""
WAIT = 30.0
"""Seconds until then, at most: a process that was killed holds its memory for a while."""


_NOT_KEPT = ("PYTHONDONTWRITEBYTECODE",)
"""Environment variables. Without bytecode every start compiles a thousand modules of vLLM."""


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        arguments: of `vllm_throughput.py`, besides the backend; {file} is one beside the logs.
        seconds: time limit of the row.
        backend: vLLM's name; "" for that of the row.
        keeps_cache: whether it begins with the compiled kernels of earlier rows.
        ships_kernels: whether it may use ATTNLIB_KERNELS.
    """

    arguments: str
    seconds: float = 120.0
    backend: str = ""
    keeps_cache: bool = True
    ships_kernels: bool = True


_PLAIN = "--workloads short one serve"
_ALL = f"{_PLAIN} long deep --memory 0.8"
_DEEPSEEK = f"{_PLAIN} --shape deepseek --block-size 64"
_DRAFTS = "--workloads one short --n-grams 4"
ENGINES: dict[str, Engine] = {
    **{
        f"start-empty/{name}": Engine("--workloads", keeps_cache=False, ships_kernels=False)
        for name in BACKENDS
    },
    "start-shipped/attnlib": Engine("--workloads", keeps_cache=False),
    **{f"bfloat16/{name}": Engine(_ALL, 200) for name in BACKENDS},
    **{f"fp8/{name}": Engine(f"{_ALL} --kv-cache-dtype fp8", 200) for name in BACKENDS},
    **{f"gemma3/{name}": Engine(f"{_PLAIN} --shape gemma3", 200) for name in BACKENDS},
    "deepseek/attnlib": Engine(_DEEPSEEK, 200),
    "deepseek/flash": Engine(_DEEPSEEK, 200, backend="FLASH_ATTN_MLA"),
    **{f"n-grams/{name}": Engine(_DRAFTS) for name in BACKENDS},
    **{f"start-full/{name}": Engine("--workloads") for name in BACKENDS},
    **{f"start-n-grams/{name}": Engine("--workloads --n-grams 4") for name in BACKENDS},
    **{f"start-parts/{name}": Engine("--workloads --start-parts {file}") for name in BACKENDS},
    **{
        f"profile-n-grams/{name}": Engine("--workloads short --n-grams 4 --profile {file}")
        for name in BACKENDS
    },
    "int8/attnlib": Engine(f"{_ALL} --kv-cache-dtype int8_per_token_head", 200),
    "nvfp4/attnlib": Engine(f"{_ALL} --kv-cache-dtype nvfp4", 200),
    "int4/attnlib": Engine(f"{_ALL} --kv-cache-dtype int4_per_group", 200),
    "joined-write/attnlib": Engine("--workloads one short --joined-write"),
    **{
        f"deep-uncached/{name}": Engine("--workloads deep-uncached --memory 0.8", 150)
        for name in BACKENDS
    },
    **{f"eager/{name}": Engine("--workloads one short --mode eager") for name in BACKENDS},
    "eager-joined-write/attnlib": Engine("--workloads one short --mode eager --joined-write"),
}  # fmt: skip
"""Row -> engine, the most important ones first."""
TOKENS = {
    "tokens": (("llama", "mistral", "gemma2", "loops"), ()),
    "tokens-latent": (("deepseek",), ("latent",)),
}  # fmt: skip
"""Row -> models, and arguments of `vllm_gpu_cases.py`."""
TOKEN_SECONDS = 150.0


class Run:
    """The rows of one call.

    Args:
        folder: of the results.
        name: of their files, without the suffix.
        end: of the run, by the monotonic clock.
        caches: folder of Triton's caches; None for one beside the results.
    """

    def __init__(self, folder: Path, name: str, end: float, caches: Path | None = None) -> None:
        self._lines, self._logs = folder / f"{name}.jsonl", folder / f"{name}.logs"
        self._caches, self._end = caches or folder / f"{name}.triton", end

    def measure(self, row: str) -> dict[str, Any]:
        """The result of a row; `error` where it has no more than the workloads before."""
        self._logs.mkdir(parents=True, exist_ok=True)
        if row in TOKENS:
            return self._compare_tokens(row, *TOKENS[row])
        engine = ENGINES[row]
        if not engine.keeps_cache:
            shutil.rmtree(self._cache(row), ignore_errors=True)
        wait_for_memory()
        before = _lines(self._lines)
        backend = engine.backend or BACKENDS[row.rpartition("/")[2]]
        file = str(self._logs / f"{row.replace('/', '-')}.json")
        arguments = engine.arguments.replace("{file}", file).split()
        command = [HERE / "vllm_throughput.py", "--backend", backend, *arguments]
        command += ["--out", self._lines]
        dropped = () if engine.ships_kernels else ("ATTNLIB_KERNELS",)
        error = self._run(row, command, time.monotonic() + engine.seconds, dropped)
        found = [json.loads(line) for line in _lines(self._lines)[len(before) :]]
        late = sorted({line for workload in found for line in workload.get("late", ())})
        error = error or " | ".join(line for line in late if is_own(line.rpartition(" ")[2]))
        return {"workloads": found} | ({"error": error} if error else {})

    def _compare_tokens(
        self, row: str, names: tuple[str, ...], kind: tuple[str, ...]
    ) -> dict[str, Any]:
        end = time.monotonic() + TOKEN_SECONDS
        with tempfile.TemporaryDirectory() as models:
            cases, results = (self._logs / f"{row}-{name}.json" for name in ("cases", "results"))
            script = [HERE / "vllm_gpu_cases.py", models, cases]
            error = (
                self._run(row, [TESTS / "models.py", models, *names], end)
                or self._run(row, [*script, *kind], end)
                or self._run(row, [TESTS / "run_engine.py", cases, results], end)
                or self._run(f"{row}-report", [*script, results], end)
            )
        if error:
            return {"error": error}
        return {"lines": _lines(self._logs / f"{row}-report.log")}

    def _cache(self, row: str) -> Path:
        """The folder of Triton's cache: one for each backend, and for a row with its own."""
        keeps = row not in ENGINES or ENGINES[row].keeps_cache
        return self._caches / (row.rpartition("/")[2] if keeps else row.replace("/", "-"))

    def _run(self, row: str, command: list[Any], end: float, dropped: Sequence[str] = ()) -> str:
        """Run a script until it ends, or its row, or the run; why it failed, or "".

        Args:
            row, command, end: of the script.
            dropped: environment variables that it does not get.
        """
        left = max(1.0, min(end, self._end) - time.monotonic())
        log = self._logs / f"{row.replace('/', '-')}.log"
        print(f"{row}: at most {left:.0f} s, output in {log}", file=sys.stderr, flush=True)
        variables = {
            "VLLM_USE_FLASHINFER_SAMPLER": "0", "TEST_VLLM_CPU": "0", "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(self._cache(row)),
        }  # fmt: skip
        kept = {k: v for k, v in os.environ.items() if k not in (*dropped, *_NOT_KEPT)}
        with log.open("w") as sink:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)], stdout=sink, stderr=subprocess.STDOUT,
                env={**kept, **variables}, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, SIGNAL)
                time.sleep(_DUMP_SECONDS)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"stopped after {left:.0f} s: {where(_lines(log)) or _end_of(log)}"
        return "" if code == 0 else f"exit {code}: {_end_of(log)}"


def is_own(kernel: str) -> bool:
    """Whether a kernel of this name is attnlib's, and not vLLM's."""
    return any(f"def {kernel}(" in file.read_text() for file in PACKAGE.rglob("*.py"))


def wait_for_memory() -> None:
    """Wait until earlier engines have left the GPU; does nothing without `nvidia-smi`."""
    query = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        try:
            found = subprocess.run([*query, "-i", visible], capture_output=True, text=True)
        except FileNotFoundError:
            return
        if found.returncode:
            return
        free, total = map(float, found.stdout.split(","))
        if free >= FREE * total:
            return
        time.sleep(1)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _end_of(log: Path) -> str:
    return " | ".join(_lines(log)[-8:])[-1500:]


def main() -> int:
    """Parse the command line and run the rows."""
    parser = rows.parser(__doc__)
    parser.add_argument("--triton-cache", type=Path, help="folder of Triton's caches")
    options = parser.parse_args()
    out, end = options.out or Path("one_gpu.json"), time.monotonic() + options.limit_seconds
    run = Run(out.resolve().parent, out.stem, end, options.triton_cache)
    measure: Callable[[str], dict[str, Any]] = partial(Run.measure, run)
    return rows.run(options, [*ENGINES, *TOKENS], measure)


if __name__ == "__main__":
    sys.exit(main())
