"""Tables that ship with attnlib, for the chips on which it was measured.

`tables/*.json` holds one table per chip in the format of `attnlib.tuning.table`. Parameters of
backends apply to the chip that they were measured on, and to chips of the same compute capability
without a table whose name resembles that chip's most. A ranking applies
to the chip that it was measured on, and to chips of the same compute capability whose tables do not
rank such layers: each takes it from the chip whose name resembles its own most. It also applies to
layers that differ from it

- in the block size alone, if both block sizes are at least 16: such blocks are loaded by the same
  instructions;
- in the kind of float8 elements as well: an e5m2 cache has as many bytes as an e4m3 cache, and the
  same kernels read it.

Other layers over float8 caches, or over caches of 16-bit floats, that the Hopper kernels serve take
the order of those that were measured on a chip, if one backend was the fastest in each class of
them; latents take that of measured latents. Each of these rules precedes the next one on every
chip.
`benchmarks/ship_rankings.py` writes the tables from results of `attnlib bench` and `attnlib tune`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

from attnlib import env
from attnlib.device import DeviceInfo
from attnlib.ops.triton.hopper.sizes import BLOCK_SIZES, LATENT_SIZES, decode_rows
from attnlib.spec import LayerSpec
from attnlib.tuning.layers import layer_class
from attnlib.tuning.store import chip_name
from attnlib.tuning.table import Ranking, Tuning, parse_tuning

__all__ = ["shipped_ranking", "shipped_rankings", "shipped_tunings", "shipped_tuning"]

_TABLES = Path(__file__).with_name("tables")
_WHOLE_BLOCKS = 16
"""Smaller blocks have kernels of their own, so that measurements of others say nothing about them.
"""
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_16_BITS = ("bfloat16", "float16")
_LATENTS = "mla"
_FEATURES = frozenset({"window", "soft cap", "sinks"})
"""Features that the kernels of the measured layers have too. Layers with others may use other
kernels."""


@functools.lru_cache(maxsize=1)
def shipped_tunings() -> tuple[tuple[tuple[int, int], Tuning], ...]:
    """(compute capability, table) of each chip, read once, on first use."""
    found = []
    for path in sorted(_TABLES.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        source = f"attnlib's own table of the {data['chip']}, tuning/tables/{path.name}"
        major, minor = data["capability"]
        found.append(((major, minor), parse_tuning(data, source)))
    return tuple(found)


def shipped_tuning(device: DeviceInfo) -> Tuning | None:
    """The shipped table of a chip, else that of the nearest measured chip of the same compute
    capability.

    Returns None if there is none, or if ATTNLIB_TUNING=off.
    """
    chip = _chip_with_tables(device)
    names = () if chip is None else _nearest_chips(chip, device.capability)
    return next((table for _, table in shipped_tunings() if table.chip in names[:1]), None)


def _chip_with_tables(device: DeviceInfo) -> str | None:
    """The name of a chip; None without one, or if ATTNLIB_TUNING=off.

    Shipped tables apply to hypothetical devices with a name, too.
    """
    off = env.read("ATTNLIB_TUNING").lower() == "off"
    return None if off else chip_name(replace(device, is_hypothetical=False))


def shipped_rankings(chip: str) -> tuple[Ranking, ...]:
    """All shipped rankings for a chip, by the driver's name of it."""
    return next((table.rankings for _, table in shipped_tunings() if table.chip == chip), ())


@functools.lru_cache(maxsize=16)
def _nearest_chips(chip: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The measured chips of a compute capability, the one whose name resembles `chip` most first.

    Names are compared up to the length of the shortest one, because they begin with the model and
    go on with memory sizes and packages ("80GB HBM3").
    """
    measured = [table.chip for found, table in shipped_tunings() if found == capability]
    length = min(map(len, (chip, *measured)))

    def resemblance(other: str) -> float:
        return SequenceMatcher(None, chip[:length], other[:length], autojunk=False).ratio()

    return tuple(sorted(measured, key=lambda name: (name != chip, -resemblance(name))))


def _of_nearest_blocks(chip: str, layer: Mapping[str, Any]) -> Ranking | None:
    """The ranking of a chip for a class of layers, else for the same layers with the nearest block
    size, and then with that size in `Ranking.block_size`.
    """
    size = layer["block_size"]
    found = {
        ranking.layer["block_size"]: ranking
        for ranking in shipped_rankings(chip)
        if {**ranking.layer, "block_size": size} == layer
    }
    if size in found:
        return found[size]
    measured = [other for other in found if min(size, other) >= _WHOLE_BLOCKS]
    if not measured:
        return None
    nearest = min(measured, key=lambda other: (abs(math.log2(other / size)), other))
    return replace(found[nearest], block_size=nearest)


def _of_other_float8(chip: str, layer: Mapping[str, Any]) -> Ranking | None:
    """The ranking of a chip for the same layers over the other float8 elements, which are then in
    `Ranking.kv_cache_dtype`.
    """
    dtype = layer["kv_cache_dtype"]
    for other in _FLOAT8 if dtype in _FLOAT8 else ():
        found = _of_nearest_blocks(chip, {**layer, "kv_cache_dtype": other})
        if found is not None:
            return replace(found, kv_cache_dtype=other)
    return None


def _has_hopper_kernels(layer: Mapping[str, Any]) -> bool:
    """Whether the Hopper kernels serve such layers, as they serve all measured ones; otherwise the
    portable kernels do. (Those over smaller blocks differ from the measured ones, too.)"""
    stored, sizes = layer["kv_cache_dtype"], (layer["head_size"], layer["head_size_v"])
    if layer["features"] == [_LATENTS]:
        return stored in _16_BITS and sizes == LATENT_SIZES and layer["block_size"] in BLOCK_SIZES
    multiple = 16 if stored in _FLOAT8 else 8
    return (
        layer["block_size"] in BLOCK_SIZES
        and all(64 <= size <= 256 and size % multiple == 0 for size in sizes)
        and layer["group_size"] <= decode_rows(layer["head_size_v"], getattr(torch, stored))
    )


def _of_all_layers(chip: str, layer: Mapping[str, Any]) -> Ranking | None:
    """The order of all measured layers of a chip over float8 caches with the same dtype of queries,
    or over caches of 16-bit floats, with their number in `Ranking.classes`; None if their fastest
    backends differ.
    """
    stored = layer["kv_cache_dtype"]
    queries: tuple[str, ...]
    if stored in _FLOAT8:
        queries, caches = (layer["dtype"],), _FLOAT8
    elif stored in _16_BITS and stored == layer["dtype"]:
        queries = caches = _16_BITS
    else:
        return None
    is_latent = _LATENTS in layer["features"]
    if not (is_latent or _FEATURES.issuperset(layer["features"])) or not _has_hopper_kernels(layer):
        return None
    found = [
        ranking
        for ranking in shipped_rankings(chip)
        if ranking.layer["dtype"] in queries
        and ranking.layer["kv_cache_dtype"] in caches
        and ranking.layer["block_size"] >= _WHOLE_BLOCKS
        and (_LATENTS in ranking.layer["features"]) is is_latent
    ]
    if len({ranking.order[0] for ranking in found}) != 1:
        return None
    order = tuple(dict.fromkeys(name for ranking in found for name in ranking.order))
    dtypes = sorted({str(ranking.layer["kv_cache_dtype"]) for ranking in found})
    return replace(
        found[0], order=order, relative={}, kv_cache_dtype=" or ".join(dtypes), classes=len(found)
    )


_RULES: tuple[Callable[[str, Mapping[str, Any]], Ranking | None], ...] = (
    _of_nearest_blocks,
    _of_other_float8,
    _of_all_layers,
)


def shipped_ranking(spec: LayerSpec, device: DeviceInfo) -> Ranking | None:
    """The shipped ranking for layers like `spec`: of this chip, else of the nearest measured chip
    of the same compute capability, with the other chip's name in `Ranking.chip`. On each chip the
    exact block size precedes the nearest one, which is then named in `Ranking.block_size`. Layers
    over caches of floats that no chip ranks take the order of other such layers, which
    `Ranking.kv_cache_dtype` and `Ranking.classes` describe.

    Returns None if there is none, or if ATTNLIB_TUNING=off.
    """
    chip = _chip_with_tables(device)
    if chip is None:
        return None
    layer = layer_class(spec)
    for rule in _RULES:
        for name in _nearest_chips(chip, device.capability):
            ranking = rule(name, layer)
            if ranking is not None:
                return ranking if name == chip else replace(ranking, chip=name)
    return None
