"""The benchmark of divided layers runs with gloo on a CPU, with all of its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attnlib import AttentionSpec
from attnlib.parallel import ExchangeMethod, exchange_bytes
from benchmarks.parallel import decode

SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_size=16, dtype=torch.float32)


def _run(found: Path, world_size: int, *more: str) -> dict[str, Any]:
    """What is in the file, after a check that the same was printed row by row."""
    options = "--shrink 1024 --repeats 1 --num-heads 8 --num-kv-heads 2 --head-size 16 --out"
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    arguments = ["-m", "benchmarks.parallel", *options.split(), str(found), *more]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(found.read_text())
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert printed[0] == result["bytes_per_us"]
    for name in ("decode", "prefill"):
        assert [row[name] for row in printed if name in row] == result[name]
    return result


@pytest.mark.slow
def test_no_row_starts_after_the_limit(tmp_path: Path) -> None:
    result = _run(tmp_path / "found.json", 1, "--limit-seconds", "0")
    assert result["decode"] == result["prefill"] == [] and not result["complete"]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "groups"), [(1, []), (2, ["--groups", "2", "1"])])
def test_rows_of_a_small_run(tmp_path: Path, world_size: int, groups: list[str]) -> None:
    """One after the other, in groups of both sizes."""
    result = _run(tmp_path / "found.json", world_size, *groups)
    sizes = [2, 1] if groups else [1]
    assert result["ranks"] == sizes and result["complete"]
    decodes = [(row["gpus"], row["requests"], row["length"]) for row in result["decode"]]
    problems = [(2, 64), (4, 128), (16, 32), (1, 1024)]
    assert decodes == [(size, *problem) for size in sizes for problem in problems]
    prefills = [(row["gpus"], row["new"], row["context"]) for row in result["prefill"]]
    assert prefills == [(size, *lengths) for size in sizes for lengths in ((128, 0), (8, 120))]
    for row in (*result["decode"], *result["prefill"]):
        assert row["one_gpu"] > 0 and "met" not in row  # targets are for GPUs
    for size, (name, rates) in zip(sizes, result["bytes_per_us"].items(), strict=True):
        assert name == f"{size} ranks" and bool(rates) == (size > 1)


def test_parts_of_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is the slowest rank and the received bytes at the measured rate."""
    ranks = SimpleNamespace(
        spec=SPEC,
        rank_spec=SPEC.replace(num_heads=4),
        group=SimpleNamespace(world_size=2),
        options=SimpleNamespace(profile=False),
        random=torch.zeros,
        once=lambda key, measure: [100.0, 98.0],
        in_graph=lambda calls, count=10: flat(calls),
    )
    exchanges = {"exchange": [4.0, 5.0], "queries": [1.0, 2.0]}
    divided = SimpleNamespace(
        attention=lambda: [40.0, 44.0],
        whole=lambda: [50.0, 49.0],
        parts=lambda: exchanges,
        layer=SimpleNamespace(exchange=SimpleNamespace(method=ExchangeMethod.ALL_TO_ALL)),
    )
    monkeypatch.setattr(decode, "Divided", lambda *given: divided)
    received = exchange_bytes(ranks.rank_spec, 2, 3)
    rate = {"all_gather": received["queries"] / 2, "all_to_all": received["all_to_all"] / 4}
    row = decode.decode(cast(Any, ranks), 3, 64, rate, None)
    assert (row["attention"], row["exchange_at_rate"], row["bound"]) == (44.0, 6.0, 50.0)
    assert (row["divided"], row["share_of_bound"]) == (50.0, 1.0)
    assert (row["measured_exchange"], row["share_of_parts"]) == (5.0, 0.98)
    assert (row["gpus"], row["one_gpu"], row["speedup"]) == (2, 100.0, 2.0)


def flat(calls: list[Any]) -> list[float]:
    """Times in place of calls; those of parts come as one call."""
    return calls[0] if isinstance(calls[0], list) else calls
