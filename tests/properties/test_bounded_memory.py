"""A process that sees ever new specs and shapes needs no more memory: all caches are bounded.

The caches are found by looking at every module of the package, so that a new one without a bound is
found too. `pytest -m slow tests/properties/test_bounded_memory.py --distinct-specs 100000` is the
long run.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import pkgutil
import random
import sys
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib.ops.triton.launch.cache import LaunchCache

LEAVE_OUT = ("attnlib.cli", "attnlib.bench", "attnlib.testing", "attnlib.__main__")
"""Commands and tests: their processes end."""
GROWTH_MIB = 24
"""Growth of the resident memory that is allowed between the middle and the end of a run."""
BOUND = 4096
"""The largest number of entries of any cache."""


def _modules() -> Iterator[Any]:
    """Every module of the package that can be imported here."""
    for found in pkgutil.walk_packages(attnlib.__path__, "attnlib.", onerror=lambda name: None):
        if not found.name.startswith(LEAVE_OUT):
            try:
                yield importlib.import_module(found.name)
            except ImportError:
                continue  # needs a package that is not installed


def _functions(module: Any) -> Iterator[tuple[str, Any]]:
    """Functions and methods of a module that keep results."""
    for name, thing in vars(module).items():
        owned = getattr(thing, "__module__", None) == module.__name__
        if hasattr(thing, "cache_info") and owned:
            yield f"{module.__name__}.{name}", thing
        elif inspect.isclass(thing) and owned:
            for method, function in vars(thing).items():
                function = getattr(function, "__func__", function)
                if hasattr(function, "cache_info"):
                    yield f"{module.__name__}.{name}.{method}", function


def _sizes() -> dict[str, int]:
    """Entries of every module-level container and every function that keeps results."""
    found = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if not name.startswith("attnlib") or name.startswith(LEAVE_OUT):
            continue
        for attribute, thing in list(vars(module).items()):
            mutable = isinstance(thing, Sized) and hasattr(thing, "clear")
            if mutable and not attribute.startswith("__") and not inspect.ismodule(thing):
                found[f"{name}.{attribute}"] = len(thing)
        for function, kept in _functions(module):
            found[function] = kept.cache_info().currsize
    return found


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def test_functions_that_keep_results_are_bounded() -> None:
    """`functools.cache` is for functions without arguments."""
    found = [pair for module in _modules() for pair in _functions(module)]
    assert len(found) > 10
    for name, function in found:
        arguments = inspect.signature(function.__wrapped__).parameters
        limit = function.cache_parameters()["maxsize"]
        assert not arguments or (limit is not None and limit <= BOUND), f"{name} is not bounded"


def test_a_full_launch_cache_is_cleared() -> None:
    cache = LaunchCache()
    for key in range(3 * LaunchCache.LIMIT):
        assert cache.keep(key, -key) == -key and cache[key] == -key
        assert len(cache) <= LaunchCache.LIMIT


def _run(number: int, rng: random.Random) -> None:
    """One layer of a spec that no other number has, on a batch of new shapes."""
    heads = rng.choice([1, 2, 3, 4])
    spec = attnlib.AttentionSpec(
        num_heads=heads * rng.choice([1, 2]),
        num_kv_heads=heads,
        head_size=8 * rng.randint(1, 4),
        dtype=torch.float32,
        block_size=rng.randint(1, 40),
        sliding_window=number + 1,
        logits_soft_cap=1.0 + number % 977,
        has_sink=rng.random() < 0.5,
    )
    backend = rng.choice(["torch", "torch", None])
    layer = attnlib.Attention(
        spec,
        backend=backend,
        device="cpu",
        sinks=torch.zeros(spec.num_heads) if spec.has_sink else None,
        scale=1.0 / (number + 1),
    )
    tokens, context = rng.randint(1, 9), rng.randint(0, 30)
    blocks = -(-(tokens + context) // spec.block_size)
    cache = attnlib.PagedKVCache.allocate(spec, blocks + rng.randint(0, 3), "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [tokens], [tokens + context], [list(range(blocks))], spec.block_size, "cpu"
    )
    metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
    q, k, v = (torch.zeros(tokens, n, spec.head_size) for n in (spec.num_heads, heads, heads))
    for _ in range(2):
        layer(q, k, v, cache, metadata)
    for chosen in ("triton", "prefill:torch,decode:triton"):
        attnlib.get_attn_backend(spec, chosen, "cpu")
    if number % 50 == 0:
        os.environ["ATTNLIB_TUNING"] = f"/nonexistent/{number}"
    elif number % 50 == 1:
        os.environ["ATTNLIB_TUNING"] = "off"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tuning table")
def test_new_specs_and_shapes_need_no_more_memory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = request.config.getoption("--distinct-specs")
    monkeypatch.setenv("ATTNLIB_TUNING", "off")  # restores the variable at the end
    rng, middle, sizes = random.Random(0), 0.0, {}
    for number in range(count):
        _run(number, rng)
        if number == count // 2:
            gc.collect()
            middle, sizes = _resident_mib(), _sizes()
    gc.collect()
    end, now = _resident_mib(), _sizes()
    print(f"{count} specs: {middle:.0f} MiB after half, {end:.0f} MiB at the end")
    print({name: size for name, size in now.items() if size > 100})
    assert end - middle < GROWTH_MIB
    for name, size in now.items():
        before = sizes.get(name, 0)
        assert size <= BOUND, f"{name} has {size} entries"
        assert size <= max(before, BOUND // 2) or size < 1.5 * before, f"{name}: {before} to {size}"
