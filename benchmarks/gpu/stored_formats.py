"""Rotated writes of a cache beside plain ones, and open formats beside built-in ones.

    python -m benchmarks.gpu.stored_formats --out stored_formats.json

- `write-TOKENS-FORMATS`: `write_kv` of rotated heads (P15) and of plain ones, one launch each.
- `rotary-TOKENS-FORMATS`: `rotate_and_write`, with the rotation of the cache and without it.
- `open-FORMAT-BATCH`: decodes by the portable kernels over an open format at level B (P16) and over
  the built-in format of the same bits. The open formats have one float32 scale per head of a token:
  `8` and `4` are integers, `levels4` has 8 numbers of unequal steps and their negatives, `table4`
  any 16 numbers, `squares8` signed squares, `e3m4` floats with 3 bits of exponent, and `cubes8`
  signed cubes, which the kernel looks up in shared memory.

Times are those of CUDA graphs on cold caches, in turn; `ratio` is that of the first to the second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import attnlib
from attnlib.bench.backends import BenchBackend
from attnlib.bench.case_text import parse_case
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import Peaks
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.kv_formats import KVFormat, register_kv_format
from attnlib.kv_formats.number_table import numbers_of
from attnlib.kv_rotation import KVRotation
from attnlib.ops.triton.cache_write import write_kv
from attnlib.ops.triton.rotary_write import rotate_and_write
from attnlib.score_functions import exp2, where
from benchmarks.gpu import rows
from benchmarks.gpu.variants import Portable

_FORMATS = {"int8": None, "int8-int4": "int4_per_group"}
"""Formats of the values beside int8 keys; None for int8."""
_TOKENS = (64, 256, 8192)
_BATCHES = {"32x4k": "32q1s4k", "64x8k": "64q1s8k"}
_BUILT_IN = {8: "int8_per_token_head", 4: "int4_per_group"}
_COPIES = 4
_PEAKS = Peaks(1.0, 1.0, 1.0, "not measured")


def _encode(x: torch.Tensor, number: Any, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    has_nan, (levels, codes) = x.isnan().any(-1, keepdim=True), _levels(number, bits, x.device)
    x = x.nan_to_num(0.0).clamp(-1e30, 1e30)
    scale = x.abs().amax(-1, keepdim=True) * (1 / float(levels.abs().max()))
    middles = (levels[1:] + levels[:-1]) / 2
    found = codes[torch.bucketize(x / scale.clamp(min=1e-37), middles)].to(torch.uint8)
    if bits == 4:
        found = found[:, 0::2] | found[:, 1::2] << 4
    return found, torch.where(has_nan, torch.nan, scale)


def _decode(codes: torch.Tensor, scale: torch.Tensor, number: Any, bits: int) -> torch.Tensor:
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return numbers_of(number, codes.int(), 0).float() * scale


@functools.cache
def _levels(number: Any, bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of a format in their order, and their codes."""
    codes = torch.arange(1 << bits, device=device, dtype=torch.int32)
    found = numbers_of(number, codes, 0).float().sort()
    return found.values, found.indices


def _number8(word: Any, part: int) -> Any:
    code = (word >> (8 * part)) & 255
    return code * 1.0 - where(code > 127, 256.0, 0.0)


def _number4(word: Any, part: int) -> Any:
    code = (word >> (4 * part)) & 15
    return code * 1.0 - where(code > 7, 16.0, 0.0)


def _levels4(word: Any, part: int) -> Any:
    code = (word >> (4 * part)) & 15
    size = where(code > 7, code - 8, 7 - code) * 1.0
    size = size * size * 0.03 + size * 0.25 + 0.13
    return where(code > 7, size, -size)


_TABLE = tuple(-0.9 + 0.05 * code + 0.005 * code * code for code in range(16))


def _squares8(word: Any, part: int) -> Any:
    code = (word >> (8 * part)) & 255
    root = (code & 127) * 1.0
    return where(code > 127, -root * root, root * root)


def _e3m4(word: Any, part: int) -> Any:
    code = word >> (8 * part)
    size = exp2(((code & 127) >> 4) - 1.0) * (16.0 + (code & 15))
    size = where((code & 127) > 15, size, (code & 15) * 1.0)
    return where((code & 128) > 0, -size, size)


def _cubes8(word: Any, part: int) -> Any:
    code = (word >> (8 * part)) & 255
    root = (code & 127) * 0.125
    return where(code > 127, -root * root * root, root * root * root)


_OPEN: dict[str, tuple[Any, int]] = {
    "8": (_number8, 8),
    "4": (_number4, 4),
    "levels4": (_levels4, 4),
    "squares8": (_squares8, 8),
    "table4": (_TABLE, 4),
    "e3m4": (_e3m4, 8),
    "cubes8": (_cubes8, 8),
}
"""Numbers of open formats, and their bits."""


@functools.cache
def _open_format(name: str) -> KVFormat:
    """A format with a device function; registered."""
    number, bits = _OPEN[name]
    stored = KVFormat(
        name=f"bench:{name}", version=1, dtype=torch.uint8, bits=bits, scale_dtype=torch.float32,
        groups_per_head=1, head_size_multiple=2, encode=partial(_encode, number=number, bits=bits),
        decode=partial(_decode, number=number, bits=bits), error=0.02 if bits == 8 else 0.2,
        number=number,
    )  # fmt: skip
    return register_kv_format(stored)


def _in_turn(calls: dict[str, Callable[[int], Any]]) -> dict[str, Any]:
    device = torch.device("cuda")
    expected = {name: warm_up(call, device) for name, call in calls.items()}
    timers = {
        name: GraphTimer(call, _COPIES, device, expected[name]) for name, call in calls.items()
    }
    us = {name: found.us for name, found in measure_in_turn(timers, expected).items()}
    return _compared(us)


def _compared(us: dict[str, float]) -> dict[str, Any]:
    first, second = us.values()
    return {"us": us, "ratio": first / second}


def _writes(tokens: int, values: str | None, rotary: bool) -> dict[str, Any]:
    """Writes of one layer, 32 query heads and 8 KV heads of 128, blocks of 16."""
    spec = attnlib.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16,
        kv_cache_dtype="int8_per_token_head", value_cache_dtype=values, kv_rotation=KVRotation(),
    )  # fmt: skip
    fused = torch.randn(tokens, 48 * 128, device="cuda").bfloat16()
    q, k, v = (x.view(tokens, -1, 128) for x in torch.split(fused, [4096, 1024, 1024], dim=1))
    angles = torch.randn(tokens, 64, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    blocks = max(tokens, 64)
    caches = [attnlib.PagedKVCache.allocate(spec, blocks, "cuda") for _ in range(_COPIES)]
    slots = torch.randperm(blocks * 16, device="cuda")[:tokens]

    def call(number: int, rotation: Any) -> None:
        cache = caches[number]
        pages = (cache.key_cache, cache.value_cache, slots)
        named: dict[str, Any] = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        if rotary:
            rotate_and_write(q, k, v, *pages, cos, sin, rotation=rotation, **named)
        else:
            write_kv(k, v, *pages, rotation=rotation, **named)

    rotations = {"rotated": spec.kv_rotation, "plain": None}
    return _in_turn({name: partial(call, rotation=one) for name, one in rotations.items()})


def _decodes(name: str, batch: str) -> dict[str, Any]:
    """Decodes over an open format and over the built-in one."""
    stored = _open_format(name)
    backends = [BenchBackend("triton-portable", Portable)]
    us: dict[str, float] = {}
    device = torch.device("cuda")
    for cache in (stored.name, _BUILT_IN[stored.bits]):
        case = parse_case(f"{_BATCHES[batch]}@kv={cache}")
        (row,) = measure_case(case, backends, device, _PEAKS, graphs=True, kernels_only=True)
        if row.us is None:
            raise RuntimeError(f"{cache}: {row.status}: {row.reason}")
        us[cache] = row.us
    return _compared(us)


ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"{kind}-{tokens}-{name}": partial(_writes, tokens, values, kind == "rotary")
        for tokens in _TOKENS
        for kind in ("write", "rotary")
        for name, values in _FORMATS.items()
    },
    **{
        f"open-{name}-{batch}": partial(_decodes, name, batch)
        for name in _OPEN
        for batch in _BATCHES
    },
}


@torch.inference_mode()
def measure(name: str) -> dict[str, Any]:
    """A row by its name."""
    return ROWS[name]()


if __name__ == "__main__":
    raise SystemExit(rows.run(rows.parser(__doc__).parse_args(), ROWS, measure))
