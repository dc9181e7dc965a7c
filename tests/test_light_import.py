"""Importing and selecting is light: measured in fresh processes, with a test of the test."""

import subprocess
import sys

import pytest

HEAVY = ("triton", "transformers", "flash_attn", "flashinfer", "vllm", "hypothesis", "pytest")

PROBE = """
import sys, torch
before = set(sys.modules)
{statement}
import torch
heavy = sorted({{name.split('.')[0] for name in set(sys.modules) - before}} & set({heavy!r}))
print(heavy, torch.cuda.is_initialized())
"""


def _loads(statement: str) -> str:
    program = PROBE.format(statement=statement, heavy=HEAVY)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    assert _loads("import attnlib") == "[] False"


def test_selection_loads_nothing_heavy_and_starts_no_cuda() -> None:
    """H2: selection on a CPU imports cards only."""
    spec = "attnlib.AttentionSpec(num_heads=4, head_size=64, dtype=torch.float32)"
    assert (
        _loads(
            f"import attnlib; attnlib.get_attn_backend({spec}, device='cpu'); attnlib.explain({spec}, device='cpu')"
        )
        == "[] False"
    )


@pytest.mark.parametrize(
    "room",
    [
        "hopper.support",
        "heuristics.hopper_tiles",
        "heuristics.splits",
        "heuristics.decode_numbers",
        "heuristics.tile_entries",
        "heuristics.tile_table",
        "heuristics.tiles",
        "hopper.loader",
    ],
)
def test_pure_rooms_of_the_triton_twin_need_no_triton(room: str) -> None:
    """What the card's notes, `attnlib tune` and the doctor ask of the kernels' room, on machines without triton."""
    assert _loads(f"import attnlib.ops.triton.{room}") == "[] False"


def test_the_probe_sees_triton_itself() -> None:
    pytest.importorskip("triton")
    assert _loads("import attnlib.ops.triton.hopper.dispatch") == "['triton'] False"


EXPLAIN_A_HOPPER = """
import attnlib
from attnlib.backends.triton import TritonBackend
from attnlib.device import resolve_device
spec = attnlib.AttentionSpec(num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
assert "Hopper kernel" in TritonBackend.explain_lines(spec, resolve_device("sm_90"))[0]
assert "triton" in str(attnlib.explain(spec, device="sm_90"))
"""

THE_SAME_AS_A_COMMAND = """
import contextlib, io
from attnlib.cli import main
with contextlib.redirect_stdout(io.StringIO()) as shown:
    main(["explain", "--device", "sm_90", "--num-heads", "8", "--num-kv-heads", "2", "--head-size", "128"])
assert "triton" in shown.getvalue()
"""


@pytest.mark.parametrize(
    "program", [EXPLAIN_A_HOPPER, THE_SAME_AS_A_COMMAND], ids=["function", "command"]
)
def test_explaining_a_hopper_imports_no_kernels(program: str) -> None:
    """H2: which kernels would serve is worked out from facts."""
    assert _loads(program) == "[] False"


def test_the_probe_sees_a_heavy_import() -> None:
    assert _loads("import hypothesis") == "['hypothesis'] False"


TIMER = """
import time, torch
begin = time.perf_counter()
{statement}
print(time.perf_counter() - begin)
"""


def _seconds(statement: str, rounds: int) -> float:
    """The quickest of some fresh processes: what the statement costs, not what else the machine was doing."""
    program = TIMER.format(statement=statement)
    return min(
        float(
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(rounds)
    )


def test_import_costs_next_to_nothing_over_torch() -> None:
    """At most 50 ms; the clock sees 60 ms when they are there."""
    assert _seconds("import attnlib", 2) < 0.05
    assert _seconds("time.sleep(0.06); import attnlib", 1) > 0.05


def test_an_excluded_backend_is_never_imported() -> None:
    """I6: `-name` keeps auto from importing even the card."""
    statement = (
        "import os; os.environ['ATTNLIB_BACKEND'] = '-flash_attn,-flashinfer'\n"
        "import attnlib\n"
        "attnlib.get_attn_backend(attnlib.AttentionSpec(num_heads=4, head_size=64, dtype=torch.float32), device='cpu')\n"
        "assert not [m for m in sys.modules if m.startswith(('attnlib.backends.flash_attn', 'attnlib.backends.flashinfer'))]"
    )
    assert _loads(statement) == "[] False"
