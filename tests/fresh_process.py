"""Programs in new processes that have imported torch and nothing else.

A process takes more than a second to import torch. One server process does so and forks for each
program, which finds the modules of a new process that begins with `import torch`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_module", "run_program"]

ROOT = Path(__file__).parents[1]
SERVER = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, name in enumerate((os.devnull, *request["files"])):
        file = os.open(name, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = request["path"]
    os.chdir(request["folder"])
    code = 0
    try:
        exec(compile(request["program"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    atexit.register(server.communicate)  # the end of its input ends it
    return server


def run_program(
    program: str,
    environment: Mapping[str, str] | None = None,
    path: Sequence[Path] = (),
    folder: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run Python source in a new process.

    Args:
        program: the source, which runs as `__main__`.
        environment: its environment; by default that of this process.
        path: folders before those of `sys.path`, as in `PYTHONPATH`.
        folder: its working directory; by default the root of the repository.
    """
    server = _server()
    with tempfile.TemporaryDirectory() as temporary:
        files = [Path(temporary, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        request = {
            "program": program,
            "path": [str(each) for each in path],
            "folder": str(folder),
            "files": [str(file) for file in files],
            "environment": dict(os.environ if environment is None else environment),
        }
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        out, err = (file.read_text() for file in files)
    return subprocess.CompletedProcess(program, code, out, err)


def run_module(
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    path: Sequence[Path] = (),
    folder: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m NAME ARGUMENTS` in a new process; other arguments as in `run_program`."""
    program = (
        f"import runpy, sys\nsys.argv = {[name, *arguments]!r}\n"
        f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    )
    return run_program(program, environment, path, folder)
