"""The keys of attnlib's kernels and of device functions among their constants, in several orders.

`python -m tests.ops.triton.kernel_keys MODULE` prints a JSON object for each order of first
launches: name -> key, and the keys of copies of `score`, a score function of MODULE.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import threading
from typing import Any

from triton.runtime.jit import JITFunction

import attnlib.ops.triton
from attnlib.ops.triton import quantized_pages
from attnlib.ops.triton.kernels.decode import decode_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.score_compile import compile_score
from attnlib.testing.score_functions import SUITE, load_score_function
from tests.kv_formats.device_formats import SQUARES

__all__: list[str] = []

ORDERS = ("forward", "reverse", "threads")
COPIES, THREADS = 8, 4


def kernels() -> dict[str, Any]:
    """The entry kernels, by name."""
    found = {}
    package = attnlib.ops.triton
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".kernels." not in info.name:
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            if name.endswith("_kernel") and isinstance(value, JITFunction):
                found[name] = value
    return found


def constants(module: str) -> dict[str, Any]:
    """Device functions of score functions and of a KV format, by name."""
    found = {"number": compile_score(SQUARES.number, "triton").apply}
    functions = {name: load_score_function(path) for name, (path, _) in SUITE.items()}
    for name, function in functions.items():
        for language in ("triton", "gluon"):
            for field, value in compile_score(function, language)._asdict().items():
                if value is not None:
                    found[f"{name} {language} {field}"] = value
    score = importlib.import_module(module).score
    for number in range(COPIES):  # with their own globals, as in so many processes
        found[f"copy {number}"] = compile_score.__wrapped__(score, "gluon").apply
    return found


def compute(functions: dict[str, Any], names: list[str]) -> None:
    """Compute the keys as the first launches with these functions do."""
    for name in names:
        function = functions[name]
        if name == "number":
            quantized_pages._numbers(SQUARES, SQUARES)
        elif name.endswith("_kernel"):
            BoundLaunch(function, (1, 1, 1), {})
        else:
            BoundLaunch(decode_kernel, (1, 1, 1), {"SCORE": function})
        _ = function.cache_key


def keys_in_order(order: str, functions: dict[str, Any]) -> dict[str, Any]:
    """The keys; once, after checking that Triton computes them too if it knows those of callees."""
    names = sorted(functions, reverse=order == "reverse")
    parts = [names]
    if order == "threads":
        sys.setswitchinterval(1e-5)
        parts = [names[first:] + names[:first] for first in range(0, 20 * THREADS, 20)]
    threads = [threading.Thread(target=compute, args=(functions, part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys: dict[str, Any] = {name: functions[name].cache_key for name in names}
    for name in names if order == "forward" else []:
        if not name.startswith("copy"):  # Triton 3.6 orders their constants by addresses
            functions[name].hash = None
            assert functions[name].cache_key == keys[name], name
    copies = {keys.pop(f"copy {number}") for number in range(COPIES)}
    return {**keys, "copies": sorted(copies)}


def main(module: str) -> None:
    functions = {**kernels(), **constants(module)}
    for order in ORDERS:
        child = os.fork()
        if not child:
            print(json.dumps(keys_in_order(order, functions)), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main(sys.argv[1])
