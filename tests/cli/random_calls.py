"""Random calls of the commands, drawn from their parsers: flags, choices, good and wrong values.

    python -m tests.cli.random_calls 2000 7   # 2000 calls of each command, seed 7

What takes long is replaced: measuring, the cases of the suite, models, and checks in subprocesses.
Everything before it runs: parsing, files, requests of backends, specs, selection, cases, plans.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch

from attnlib.ahead_of_time import compilation
from attnlib.bench import command as bench_command
from attnlib.bench import kv_audit_figure
from attnlib.bench.case import BenchCase
from attnlib.bench.case_text import parse_case
from attnlib.bench.peaks import Peaks
from attnlib.bench.results import SCHEMA, VERSION, Row
from attnlib.bench.runner import unmeasured
from attnlib.cli import audit_kv, doctor, kernels, main, run
from attnlib.cli.tune import session as tune_session
from attnlib.debug.record import save_recording
from attnlib.testing import commands as testing_commands
from attnlib.testing import conformance, pair_run
from attnlib.testing.case import Case
from attnlib.testing.outcome import Outcome
from attnlib.tuning.table import SCHEMA as TUNING
from tests.cli.parsers import parsers

demo_main = import_module("attnlib.cli.demo.main")  # its package has a function of this name

COMMON = [
    "",
    " ",
    "0",
    "-1",
    "1",
    "x",
    "nan",
    "1e999",
    "-",
    "--",
    "é\u2028",
    "a\nb",
    "*",
    "%s",
    "{}",
]
NUMBERS = ["1", "2", "4", "8", "16", "64", "128", "0", "-3", "3.5", "2147483648", "9" * 30, "1_0"]
DEVICES = ["cpu", "cpu", "cpu:3", "cuda", "cuda:1", "cuda:-1", "sm_90", "sm_9", "H100", "gfx942",
           "mps", "xpu", "meta", "tpu", "CPU", "NVIDIA H100 NVL", "sm_999999"]  # fmt: skip
BACKENDS = ["torch", "triton", "TORCH", "flash_attn", "flashinfer_mla", "auto", "auto,-torch",
            "-torch", "-torch,-triton", "prefill:torch,decode:torch", "prefix:torch,suffix:torch",
            "prefill:torch", "prefil:torch,decode:torch", "torch,triton", ",", "torch,", ":",
            "mine:", ":Mine", "nowhere:Mine", "TEXT:Mine", "own.py:Mine", "own.py:Absent",
            "broken.py:Mine", "own:Mine", "prefill:own:Mine,decode:torch", "torch[x=1]",
            "torch[x", "none", "tirton", "a.b.c:D", "os:path", "json:JSONDecoder"]  # fmt: skip
TEXTS = ["W2", "W2,F9/xx", "W2/*", "D2", "?2", "Z9", "fp8_e4m3", "int8_per_token_head;x", "q1s8",
         "q9s8", "8q1s4k@heads=4/2,d=16", "q1s8@heads=3/2", "q1s8@x=1", "q1s8@d=", "cpu-*", "empty",
         "q1s8,q4", "q0", "999999999999q1s8", "kv_head:128:16", "head:1:1", "a:b:c", "4:64",
         "4:64:512", "0:0", "-4:64", "fp8", "bfloat16", "float32", "int3", "torch.nn", "auto",
         "decode", "none", "decode,x", "abc1234", "torch:nn", "own.py:halved", "own.py:Mine",
         "1e3", "50.0", "0.5", "inf", "HND", "nhd", "XYZ"]  # fmt: skip
CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512,
          "torch_dtype": "bfloat16", "layer_types": ["full_attention", "sliding_attention"],
          "sliding_window": 64}  # fmt: skip
GOOD = {
    "device": ["cpu"],
    "backend": ["torch", "own:Mine", "own.py:Mine", "prefill:own:Mine,decode:torch"],
    "backends": ["torch", "own:Mine", "prefill:own:Mine,decode:torch"],
    "against": ["torch", "own:Mine"],
    "config": ["config.json", ".", *(f"config{number}.json" for number in range(8))],
    "recording": ["call.pt", *(f"call{number}.pt" for number in range(8))],
    "recordings": ["call.pt", *(f"call{number}.pt" for number in range(8))],
    "from_json": ["bench.json", *(f"bench{number}.json" for number in range(8))],
    "from_bench": ["bench.json", *(f"bench{number}.json" for number in range(8))],
    "only": ["W2", "D2,F1", "W2/*", "?2"],
    "score": ["own.py:halved"],
    "cases": ["q1s8", "8q1s4k@heads=4/2,d=16", "cpu-*"],
    "shapes": ["q1s8", "q1s8,q4"],
    "dtype": ["bfloat16", "float32"],
    "kv_cache_dtype": ["auto", "fp8", "int8_per_token_head", "nvfp4"],
    "key_selection": ["kv_head:128:16"],
    "compressed_entries": ["4:64", "4:64:512"],
    "formats": ["fp8_e4m3, scale 1", "int8_per_token_head"],
    "prompts": ["TEXT", "config.json"],
    "json": ["new/out.json"],
    "out": ["new/table.json"],
    "figures": ["new/figures"],
    "figure": ["new/figure.svg"],
    "shrink": ["new/small.pt"],
    "ops": ["none"],
}
OWN = """
from attnlib.backends.torch import TorchBackend

class Mine(TorchBackend):
    @staticmethod
    def get_name():
        return "mine"

def halved(score, q_pos, k_pos, head, request, aux):
    return score * 0.5
"""


def write_files(folder: Path, rng: random.Random) -> list[str]:
    """Files, good and damaged; their names."""
    values = [None, "x", -1, 0, 3, 2.5, [], [1], {}, True, "sliding_attention", ["mlp"], 10**20]
    files: dict[str, str] = {"TEXT": "no JSON", "LIST": "[1]", "EMPTY": "", "own.py": OWN,
                             "broken.py": "import no_such_module\n", "NULL": "null"}  # fmt: skip
    files["config.json"] = json.dumps(CONFIG)
    for number in range(8):
        damaged = {**CONFIG, rng.choice([*CONFIG, "head_dim", "attn_config", "kv_lora_rank"]):
                   rng.choice(values)}  # fmt: skip
        files[f"config{number}.json"] = json.dumps(damaged)
    run = {"provenance": {"gpu": "cpu"}, "peaks": Peaks(1.0, 1.0, 0.1, "float32").to_json()}
    case = parse_case("q1s8@heads=4/2,d=16,dtype=float32")
    row = asdict(_row(case))
    document = {"schema": SCHEMA, "version": VERSION, "runs": [run], "rows": [row]}
    files["bench.json"] = json.dumps(document)
    table = {"about": "", "schema": TUNING, "chip": "cpu", "provenance": {},
             "backends": [], "parameters": {}}  # fmt: skip
    for number in range(6):
        changed = {**table, rng.choice([*table]): rng.choice(values)}
        files[f"table{number}.json"] = json.dumps(changed if number else table)
    for number in range(8):
        key = rng.choice([*document, "more"])
        changed = {**document, key: rng.choice(values)}
        if number % 2:
            changed = {**document, "rows": [{**row, rng.choice([*row]): rng.choice(values)}]}
        files[f"bench{number}.json"] = json.dumps(changed)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "BYTES").write_bytes(bytes(range(128, 256)))
    (folder / "FOLDER").mkdir(exist_ok=True)
    recording = save_recording(Case(batch="q3s9_q1s5").materialize(), folder / "call.pt")
    whole = recording.read_bytes()
    (folder / "cut.pt").write_bytes(whole[: len(whole) // 2])
    content = torch.load(recording, weights_only=True)
    for number in range(8):
        damaged = {**content, rng.choice([*content]): rng.choice(values)}
        part = rng.choice(["case", "spec", "params", "cache"])
        if number % 2:
            damaged = {**content, part: {**content[part], rng.choice([*content[part]]): 3}}
        torch.save(damaged, folder / f"call{number}.pt")
    recordings = ["call.pt", *(f"call{number}.pt" for number in range(8)), "cut.pt"]
    return [*files, *recordings, "BYTES", "FOLDER", "MISSING", "TEXT/x", "new/file", "."]


def draw_environment(files: list[str], rng: random.Random) -> dict[str, str]:
    """Variables of one call; most calls have none."""
    choices = {
        "ATTNLIB_BACKEND": BACKENDS,
        "ATTNLIB_KV_CACHE_LAYOUT": ["NHD", "hnd", "XYZ"],
        "ATTNLIB_PLUGINS": ["0", "1", "yes"],
        "ATTNLIB_VALIDATE": ["0", "1", "3"],
        "ATTNLIB_TUNING": ["off", *files],
        "ATTNLIB_BACKND": ["torch"],
    }
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.06}


def draw(parser: argparse.ArgumentParser, files: list[str], rng: random.Random) -> list[str]:
    """Arguments of one call. Of some calls every value is good, of others most are not."""
    words: list[str] = []
    wrong, share = rng.choice((0.0, 0.0, 0.1, 0.5)), rng.choice((0.05, 0.15, 0.3))
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        if action.option_strings and rng.random() > share and action.dest != "device":
            continue
        words += [*action.option_strings[:1], *_values(action, files, wrong, rng)]
    if rng.random() < wrong / 2:
        words.insert(rng.randrange(len(words) + 1), rng.choice([*COMMON, "--help", "--nothing"]))
    return words


def _values(
    action: argparse.Action, files: list[str], wrong: float, rng: random.Random
) -> list[str]:
    if action.nargs == 0:
        return []
    most = 3 if action.nargs in ("*", "+") else 1
    least = 0 if action.nargs in ("*", "?") else 1
    return [_value(action, files, wrong, rng) for _ in range(rng.randint(least, most))]


def _value(action: argparse.Action, files: list[str], wrong: float, rng: random.Random) -> str:
    kind = getattr(action.type, "__name__", "")
    if rng.random() < wrong / 4:
        return rng.choice([*COMMON, *NUMBERS, *DEVICES, *BACKENDS, *TEXTS, *files])
    if action.choices:
        return str(rng.choice(list(action.choices)))
    numeric = kind in ("count", "seed", "seconds", "workers", "float")
    if rng.random() >= wrong:
        return rng.choice(NUMBERS[:7] if numeric else GOOD.get(action.dest, TEXTS))
    if action.dest == "device":
        return rng.choice(DEVICES)
    if action.dest in ("backend", "backends", "against"):
        return rng.choice(BACKENDS)
    if numeric:
        return rng.choice(NUMBERS)
    return rng.choice(files if kind == "parse" or action.dest == "model" else TEXTS)


_cell = pair_run.ParityCell("a", "b", "c", "M1", Outcome.PASS, "", 0.0)


def _row(case: BenchCase) -> Row:
    return unmeasured(case, "torch", "failed", "no reason")


@contextlib.contextmanager
def without_work() -> Iterator[None]:
    """Replace what takes long."""
    report = mock.Mock(passed=True)
    with contextlib.ExitStack() as stack:
        for place, name, stub in (
            (bench_command, "_run", lambda *a: 0),
            (bench_command, "measure_peaks", lambda device: Peaks(1.0, 1.0, 0.1, "")),
            (tune_session.Session, "tune", lambda *a: None),
            (tune_session, "measure_case", lambda case, *a: [_row(case)]),
            (tune_session, "measure_peaks", lambda device: None),
            (demo_main, "_demo", lambda *a: 0),
            (run, "_become", lambda *a: 0),
            (audit_kv, "_audit_model", lambda *a: ("nothing", {})),
            (audit_kv, "audit_table", lambda *a: ""),
            (kv_audit_figure, "draw_audit", lambda *a: None),
            (doctor, "_backends", lambda: []),
            (compilation, "_compile_shares", lambda shares: []),
            (kernels, "needed_kernels", lambda *a: []),
            (conformance, "run_conformance", lambda *a, **k: report),
            (pair_run.Pair, "run", lambda *a: _cell),
            (testing_commands, "_run_certify", lambda args: 0),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(place, name, stub))
        stack.enter_context(mock.patch("attnlib.testing.report.report_to_json", lambda r: "{}"))
        yield


def fault(words: list[str]) -> str:
    """What is wrong with the answer to a call; "" for nothing."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words)
    except BaseException:
        return traceback.format_exc()
    text = err.getvalue()
    if status not in (0, 1, 2, 3) or "Traceback" in text:
        return f"status {status}: {text}"
    lines = [line for line in text.splitlines() if not line.startswith("left out: ")]
    if status == 2 and not (lines and lines[-1].startswith(f"attnlib {words[0]}: ")):
        return f"status 2 without a reason: {text!r}"
    return ""


def faults(name: str, calls: int, seed: int) -> Iterator[tuple[list[str], str]]:
    """The calls of one command that get a wrong answer."""
    rng = random.Random(f"{name} {seed}")
    parser = parsers()[name]
    before = os.getcwd(), list(sys.path)
    home = mock.patch.dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, without_work(), home:
        os.chdir(folder)
        try:
            files = write_files(Path(folder), rng)
            os.environ["HOME"] = folder  # where tuning tables are
            for _ in range(calls):
                words = [name, *draw(parser, files, rng)]
                variables = draw_environment(files, rng)
                with mock.patch.dict(os.environ, variables):
                    if reason := fault(words):
                        yield [*(f"{key}={value}" for key, value in variables.items()),
                               *words], reason  # fmt: skip
        finally:
            os.chdir(before[0])
            sys.path[:] = before[1]
            for module in ("own", "broken"):  # no other test may find it by its name
                sys.modules.pop(module, None)


if __name__ == "__main__":
    count, seed = (int(word) for word in (*sys.argv[1:], "200", "0")[:2])
    for command in parsers():
        for words, reason in faults(command, count, seed):
            print(f"attnlib {' '.join(map(repr, words))}\n{reason}\n")
