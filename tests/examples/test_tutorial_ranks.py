"""The tutorial's engine on several ranks generates the tokens of the engine on one."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from attnlib.parallel import RankGroup
from examples import divided_layers, tutorial_ranks
from examples.gemma3 import random_decoder
from examples.tutorial_engine import Engine, Request, make_requests
from examples.tutorial_ranks import RankEngine, Ranks, rank_model
from tests.fresh_process import ROOT
from tests.parallel.workers import results


def requests() -> list[Request]:
    return make_requests(lambda text: list(text.encode())[::5])


def serve(context: int, group: RankGroup) -> str:
    """A small pool, so that requests are preempted, and prompts in several chunks."""
    model = random_decoder().eval()
    wanted, found = requests(), requests()
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        Engine(model, 64, token_budget=23).serve(wanted)
        engine = RankEngine(model, Ranks.of(context), 12, block_size=4, token_budget=23)
        engine.serve(found)
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        if one.generated != other.generated:
            return f"request {number}: {other.generated}, on one rank {one.generated}"
    return "" if context == 1 or engine.num_reused_tokens else "no prefix was reused"


CASES: dict[str, Callable[[RankGroup], str]] = {
    str(context): partial(serve, context) for context in (1, 2, 4)
}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "context"), [(2, 1), (2, 2), (4, 2)])
def test_tokens_are_those_of_one_rank(world_size: int, context: int) -> None:
    """Heads divided only, keys only, and both."""
    texts = results("tests.examples.test_tutorial_ranks", [str(context)], world_size)
    assert not any(texts[str(context)]), "\n".join(texts[str(context)])


@pytest.mark.parametrize(
    ("world_size", "context", "action"),
    [(4, 4, "choose --context 2$"), (2, 4, "--context 1 or 2$"), (3, 3, "--nproc-per-node$")],
)
def test_sizes_that_cannot_be_divided(world_size: int, context: int, action: str) -> None:
    """Two KV heads of two query heads; the message says which command works."""
    ranks = Ranks(world_size, 0, SimpleNamespace(world_size=context), 0, 1)
    with pytest.raises(ValueError, match=f"{context} of which share keys: .*{action}"):
        rank_model(random_decoder(), ranks)


@pytest.mark.parametrize("context", [-1, 0, 3, 8])
def test_ranks_that_do_not_divide_the_processes(
    context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any group is made, for which the other ranks would wait."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(ValueError, match=f"--context {context} .*: choose 1 or 2 or 4, or another"):
        Ranks.of(context)


COMMANDS = [
    command
    for module in (tutorial_ranks, divided_layers)
    for command in re.findall(r"^    torchrun (.*)$", module.__doc__ or "", re.M)
]


@pytest.mark.parametrize("module", [tutorial_ranks, divided_layers])
def test_a_start_without_torchrun_names_the_command(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example"])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    shown = f"{stopped.value}{capsys.readouterr().err}"
    assert (
        f"torchrun --nproc-per-node {2 if module is tutorial_ranks else 3} -m {module.__name__}"
        in shown
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_examples_run(command: str) -> None:
    """With the model, if it is installed."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(command)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^equal to .*: True$", done.stdout, re.M), done.stdout
