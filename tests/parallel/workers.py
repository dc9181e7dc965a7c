"""Processes of one gloo group that run many cases, forked once per number of ranks.

`run_ranks` runs in a process of `tests.fresh_process`, which forks the ranks. A rank that fails in
the middle of a case leaves the others waiting for `TIMEOUT`; the group then ends, and the cases
after it have no result.
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

from attnlib.parallel import RankGroup
from tests.fresh_process import run_program

__all__ = ["results", "run_ranks"]

TIMEOUT = timedelta(seconds=20)


def results(
    module: str,
    names: Sequence[str],
    world_size: int,
    environment: Mapping[str, str] | None = None,
) -> dict[str, list[str]]:
    """For each case the texts of all ranks: "" where the rank finds nothing wrong.

    Args:
        module: has `CASES`, a dictionary of functions of a `RankGroup`.
        names: of cases.
        world_size: ranks.
        environment: further variables of the ranks.
    """
    program = (
        "import torch\nfrom tests.parallel.workers import run_ranks\n"
        f"run_ranks({module!r}, {list(names)!r}, {world_size})"
    )
    run = run_program(program, {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})})
    assert run.returncode == 0, run.stderr
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


def run_ranks(module: str, names: Sequence[str], world_size: int) -> None:
    """Fork the ranks and print their results as one line of JSON."""
    import_module(module)  # once, before the forks
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                _rank(module, names, world_size, rank, Path(folder))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        ranks = [Path(folder, f"{rank}.json") for rank in range(world_size)]
        texts = [json.loads(file.read_text()) if file.exists() else {} for file in ranks]
    print(json.dumps({name: [each.get(name, "not run") for each in texts] for name in names}))


def _rank(module: str, names: Sequence[str], world_size: int, rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    try:
        cases = import_module(module).CASES
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
            timeout=TIMEOUT,
        )  # fmt: skip
        group = RankGroup()
        for name in names:
            try:
                found[name] = cases[name](group) or ""
            except Exception:
                found[name] = traceback.format_exc()
                break
    finally:
        (folder / f"{rank}.json").write_text(json.dumps(found))
