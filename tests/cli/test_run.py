"""`attnlib run`: programs whose transformers models use attnlib."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from attnlib.cli import run
from attnlib.cli.main import main

ROOT = Path(__file__).parents[2]
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
"""


def _run(
    *words: str, path: str = "", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The program of the command as a child; `attnlib` itself would import torch first."""
    made: list[subprocess.CompletedProcess[str]] = []

    def become(command: list[str], variables: dict[str, str]) -> None:
        made.append(
            subprocess.run(
                command, capture_output=True, text=True, cwd=cwd, env=variables, timeout=600
            )
        )

    python_path = os.pathsep.join(one for one in (path, str(ROOT)) if one)
    variables = {"PYTHONPATH": python_path, **environment}
    with mock.patch.dict(os.environ, variables), mock.patch.object(run, "_become", become):
        main(["run", *words])
    return made[0]


def _program(folder: Path, text: str, name: str = "program.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_script_has_its_arguments_exit_status_and_output(tmp_path: Path) -> None:
    """Without transformers nothing is imported."""
    text = (
        "import sys\n"
        "print(sys.argv, __name__, __file__, sys.path[0])\n"
        "print([name for name in ('torch', 'transformers', 'attnlib') if name in sys.modules])\n"
        "sys.exit('a message')\n"
    )
    script = _program(tmp_path, text)
    done = _run(script, "--help", "--", "-m", "x y")
    assert done.returncode == 1 and done.stderr == "a message\n"
    first, second = done.stdout.splitlines()
    assert first == f"{[script, '--help', '--', '-m', 'x y']} __main__ {script} {tmp_path}"
    assert second == "[]"


@pytest.mark.parametrize("before", [[], ["--"]])
def test_a_module_and_a_program(tmp_path: Path, before: list[str]) -> None:
    text = "import sys; print('module', sys.argv[1:]); sys.exit(3)"
    _program(tmp_path, text, "some_module.py")
    done = _run(*before, "-m", "some_module", "-x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "module ['-x']\n"), done.stderr
    program = _program(tmp_path, f"#!{sys.executable}\n{text}", "a-program")
    os.chmod(program, 0o755)
    done = _run(*before, "a-program", "-x", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (3, "module ['-x']\n"), done.stderr


def test_a_program_beside_the_interpreter_is_found(tmp_path: Path) -> None:
    done = _run(Path(sys.executable).name, "-c", "print(5)", PATH=str(tmp_path))
    assert done.stdout == "5\n", done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no PROGRAM"),
        (["no-such-program"], "program no-such-program is neither on PATH nor"),
        (["no/such.py"], "no/such.py does not exist"),
        (["--verbose", "x.py"], "--verbose is not an option of attnlib run"),
    ],
)
def test_what_cannot_run_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


def test_help_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    assert "transformers serve" in capsys.readouterr().out


@pytest.mark.slow
def test_a_signal_ends_the_program(tmp_path: Path) -> None:
    """The process is the program itself: it gets the signal, and its status is that of a signal."""
    text = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-m", "attnlib", "run", _program(tmp_path, text)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == -signal.SIGTERM


def test_models_use_attnlib_unless_the_program_names_another(tmp_path: Path) -> None:
    text = MODEL + (
        "print(LlamaForCausalLM(config).config._attn_implementation)\n"
        "for name in ('sdpa', 'eager', 'attnlib'):\n"
        "    model = LlamaForCausalLM._from_config(config, attn_implementation=name)\n"
        "    print(model.config._attn_implementation)\n"
        "import sys; print([one for one in sys.path if 'run_startup' in one])"
    )
    done = _run(_program(tmp_path, text))
    assert done.stdout.split("\n")[:-1] == [
        "attnlib", "sdpa", "eager", "attnlib", "[]",
    ], done.stderr  # fmt: skip


@pytest.mark.slow
def test_processes_that_the_program_starts_do_the_same(tmp_path: Path) -> None:
    """A shell script, a child, and a worker that multiprocessing spawns."""
    text = MODEL + (
        "import multiprocessing\n"
        "def show():\n"
        "    print(LlamaForCausalLM(config).config._attn_implementation, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    show()\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=show)\n"
        "    worker.start()\n"
        "    worker.join()\n"
    )
    shell = _program(tmp_path, f"#!/bin/sh\n{sys.executable} {_program(tmp_path, text)}\n", "serve")
    os.chmod(shell, 0o755)
    done = _run(shell)
    assert done.stdout == "attnlib\nattnlib\n", done.stderr


IMPORTS = (
    "import transformers.modeling_utils",
    "from transformers.generation.continuous_batching import ContinuousBatchingManager",
    "from transformers.generation import GenerationMixin",
    "from transformers import pipeline",
    "import transformers.cache_utils",
    "import attnlib.integrations.transformers",
)


@pytest.mark.slow
def test_the_order_of_imports_does_not_matter(tmp_path: Path) -> None:
    """In children of one process that has imported torch, which takes seconds, and nothing else."""
    text = (
        "import os, sys, torch\n"
        f"for statement in {IMPORTS!r}:\n"
        "    child = os.fork()\n"
        "    if child:\n"
        "        assert os.waitpid(child, 0)[1] == 0, statement\n"
        "        continue\n"
        "    assert 'transformers' not in sys.modules and 'attnlib' not in sys.modules\n"
        f"    exec(statement + {MODEL!r})\n"
        "    found = LlamaForCausalLM(config).config._attn_implementation\n"
        "    print(statement, found, sep=': ', flush=True)\n"
        "    os._exit(0)\n"
    )
    done = _run(_program(tmp_path, text))
    assert done.stdout.splitlines() == [f"{one}: attnlib" for one in IMPORTS], done.stderr


def test_the_hidden_sitecustomize_runs_too(tmp_path: Path) -> None:
    """One that fails is reported as always, and the program runs."""
    folder = tmp_path / "site"
    folder.mkdir()
    _program(folder, "import sys; sys.mark = 'own site'", "sitecustomize.py")
    script = _program(
        tmp_path, "import sys; print(sys.mark, sys.modules['sitecustomize'].__file__)"
    )
    done = _run(script, path=str(folder))
    assert done.stdout == f"own site {folder / 'sitecustomize.py'}\n", done.stderr
    _program(folder, "raise RuntimeError('broken')", "sitecustomize.py")
    done = _run(_program(tmp_path, "print(4)"), path=str(folder))
    assert done.stdout == "4\n" and "broken" in done.stderr


def test_run_within_run_adds_the_folder_once(tmp_path: Path) -> None:
    script = _program(tmp_path, "import os; print(os.environ['PYTHONPATH'].count('run_startup'))")
    done = _run(script, path=str(run._STARTUP))
    assert done.stdout == "1\n", done.stderr


@pytest.mark.slow
def test_an_interpreter_without_attnlib_says_so(tmp_path: Path) -> None:
    """Only when it makes a model."""
    text = f"import sys; sys.path.remove({str(ROOT)!r}); print('runs')\n" + (
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'attnlib': raise ImportError('no attnlib here')\n"
        "sys.meta_path.insert(0, Blocked())\n" + MODEL + "LlamaForCausalLM(config)"
    )
    done = _run(_program(tmp_path, text))
    assert done.returncode == 1 and done.stdout == "runs\n"
    assert f"attnlib run: {sys.executable} cannot import attnlib (no attnlib here)" in done.stderr


def test_the_folder_holds_nothing_else() -> None:
    """What it holds hides modules of the program."""
    names = {path.name for path in run._STARTUP.iterdir()} - {"__pycache__"}
    assert names == {"sitecustomize.py"}
