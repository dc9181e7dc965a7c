"""KV1 to KV8, and KV14: the functions of a KV format by themselves (P16).

They are the rules on which prefix sharing, chunked prefills, transfers and error budgets rely. A
case is a head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attnlib.kv_formats import KVFormat, load_kv_format
from attnlib.kv_formats.number_table import numbers_of
from attnlib.ops.torch.hadamard import rotate_heads
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check, CheckCase

__all__ = ["NUMBER_CHECKS", "head_sizes"]

_HEADS = 64
_MANY = 64
"""Times as many heads as a long prefill stores in one call."""
_SIZES = (64, 96, 128, 256)
_Stored = tuple[Tensor, Tensor]


def head_sizes(stored: KVFormat, sizes: tuple[int, ...] = _SIZES) -> list[int]:
    """Sizes that a format can store, at or above the given ones."""
    multiple = stored.head_size_multiple
    return list(dict.fromkeys(-(-size // multiple) * multiple for size in sizes))


def _gaussian(size: int, seed: int = 0) -> Tensor:
    return torch.randn(_HEADS, size, generator=torch.Generator().manual_seed(seed))


def _bits(stored: _Stored) -> list[Tensor]:
    """Elements and scales as bytes, `[n, bytes]`."""
    return [x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in stored]


def _equal(first: _Stored, second: _Stored) -> bool:
    return all(map(torch.equal, _bits(first), _bits(second)))


def _check_sizes(stored: KVFormat, size: int) -> str:
    """`store` and `load` raise where a function returns other dtypes or shapes than declared."""
    if stored.head_size(stored.stored_size(size)) != size:
        return f"{stored.stored_size(size)} elements stand for heads of another size than {size}"
    for outer in ((0,), (1,), (3, 2)):
        x = _gaussian(size)[: math.prod(outer)].view(*outer, size)
        stored.load(*stored.store(x))
    return ""


def _check_repeatable(stored: KVFormat, size: int) -> str:
    x = _gaussian(size)
    given, first = x.clone(), stored.store(x)
    if not torch.equal(x, given):
        return "encode changes the heads that it gets"
    kept = tuple(part.clone() for part in first)
    stored.store(_gaussian(size, seed=1) * 3.0)
    if not _equal((first[0], first[1]), (kept[0], kept[1])):
        return "a later call changes what an earlier one returned"
    if not _equal(stored.store(x.clone()), first):
        return "equal heads give other bytes the second time"
    return ""


def _check_alone(stored: KVFormat, size: int) -> str:
    x = _gaussian(size)
    x[::5] *= 1000.0  # a large head beside small ones
    together = stored.store(x)
    for count in (1, 7):
        parts = [stored.store(x[row : row + count].clone()) for row in range(0, _HEADS, count)]
        elements, scales = (torch.cat(_bits_of(parts, side)) for side in (0, 1))
        if not all(map(torch.equal, (elements, scales), _bits(together))):
            return f"{count} heads per call give other bytes than {_HEADS} heads"
    many = stored.store(x.repeat(_MANY, 1))
    if not all(map(torch.equal, _bits(many), (x.repeat(_MANY, 1) for x in _bits(together)))):
        return f"{_HEADS * _MANY} heads per call give other bytes than {_HEADS} heads"
    flipped = stored.store(x.flip(0))
    if not _equal((flipped[0].flip(0), flipped[1].flip(0)), together):
        return "the bytes of a head depend on the order of heads"
    if not _equal(stored.store(x.view(-1, 2, size).transpose(0, 1)), _by_pairs(together)):
        return "the bytes of a head depend on the strides of the heads"
    return ""


def _bits_of(parts: list[_Stored], side: int) -> list[Tensor]:
    return [_bits(part)[side] for part in parts]


def _by_pairs(stored: _Stored) -> _Stored:
    first, second = (x.view(torch.uint8).view(-1, 2, x[0].nbytes) for x in stored)
    return first.transpose(0, 1), second.transpose(0, 1)


def _check_bytes_only(stored: KVFormat, size: int) -> str:
    elements, scales = stored.store(_gaussian(size))
    wanted = stored.load(elements, scales)
    kept = (elements.clone(), scales.clone())
    stored.store(_gaussian(size, seed=1) * 5.0)  # state of a later call
    order = torch.randperm(_HEADS, generator=torch.Generator().manual_seed(1))
    raw = [part[order].view(like.dtype) for part, like in zip(_bits(kept), kept, strict=True)]
    if not torch.equal(stored.load(raw[0], raw[1]), wanted[order]):
        return "decoding reads more than the bytes of a head: other heads, their order, or state"
    for row in (0, _HEADS - 1):
        one = stored.load(raw[0][row : row + 1], raw[1][row : row + 1])
        if not torch.equal(one[0], wanted[order[row]]):
            return "a head alone is decoded to other numbers than among others"
    stored.load(elements, scales)
    if not _equal((elements, scales), kept):
        return "decode changes the bytes that it gets"
    return ""


def _check_zeros(stored: KVFormat, size: int) -> str:
    assert stored.scale_dtype is not None  # of a format with scales in the page
    elements = torch.zeros(_HEADS, stored.stored_size(size), dtype=torch.uint8).view(stored.dtype)
    scales = torch.zeros(_HEADS, stored.num_scales(size), dtype=stored.scale_dtype)
    if not bool(stored.load(elements, scales).isfinite().all()):
        return "a page of zeros decodes to NaN or infinity: unused slots would poison sums"
    if bool(stored.load(*stored.store(torch.zeros(2, size))).any()):
        return "a head of zeros decodes to other numbers"
    generator = torch.Generator().manual_seed(0)
    for kind in ("random", "equal"):
        for part in (elements, scales):
            raw = part.view(torch.uint8)
            raw.random_(0, 256, generator=generator) if kind == "random" else raw.fill_(255)
        try:
            stored.load(elements, scales)
        except Exception as error:  # whatever a package raises
            return (
                f"decode raises {type(error).__name__} for {kind} bytes ({error}): unused slots "
                "may hold any, and decode to any numbers"
            )
    return ""


def _check_nan(stored: KVFormat, size: int) -> str:
    clean = _gaussian(size)[:4]
    x = clean.clone()
    x[1, size // 2] = torch.nan
    found, wanted = (stored.load(*stored.store(heads)) for heads in (x, clean))
    if not bool(found[1].isnan().any()):
        return "a NaN is hidden: a broken layer would look healthy"
    others = [0, 2, 3]
    if not torch.equal(found[others], wanted[others]):
        return "a NaN changes other heads"
    each = clean[:1].repeat(size, 1).fill_diagonal_(torch.nan)
    hidden = ~stored.load(*stored.store(each)).isnan().any(-1)
    if bool(hidden.any()):
        return f"a NaN is hidden where it is element {hidden.nonzero()[0].item()} of a head"
    return ""


def _check_saturation(stored: KVFormat, size: int) -> str:
    x = _gaussian(size)[:6]
    x[0], x[1] = 3e38, -torch.inf
    x[2, size // 2], x[3, 0], x[4, 0] = torch.inf, -3e38, -1e30
    found = stored.load(*stored.store(x))
    if not bool(found.isfinite().all()):
        return "infinities or large numbers decode to NaN or infinity"
    largest = x.abs() == x.abs().amax(-1, keepdim=True)
    if bool((found.sign() != x.sign())[largest].any()):
        return "the largest numbers of a head lose their signs"
    powers = torch.arange(-149.0, 128.0)
    x = _gaussian(size)[:1] * torch.exp2(powers.double()).float()[:, None]
    found = stored.load(*stored.store(x)).abs().amax(-1)
    wrong = ~(found <= 4.0 * x.abs().amax(-1).clamp(min=4.0 * stored.span[0]))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        return f"heads of rms 2^{powers[at]:.0f} decode to numbers up to {found[at]:.1e}"
    return ""


def _check_error(stored: KVFormat, size: int) -> str:
    x = _gaussian(size)
    heads = {"of rms 1": x, "at the end of span": x * stored.span[1]}
    heads["at the start of span"] = x * stored.span[0]
    if stored.rotated:
        outlier = x.clone()
        outlier[:, 3] *= 50.0
        heads["with an outlier, rotated"] = rotate_heads(outlier.unsqueeze(1), 0).squeeze(1)
    for name, given in heads.items():
        off = (stored.load(*stored.store(given)) - given).double()
        error = float((off.square().mean(-1) / given.double().square().mean(-1)).sqrt().mean())
        if not error <= stored.error:
            return f"heads {name} have an error of {error:.4f}; it states {stored.error}"
    return ""


def _check_device(stored: KVFormat, size: int) -> str:
    """The device function times a scale against `decode`, for all words."""
    assert stored.number is not None  # `_cases` yields none without it
    assert stored.scale_dtype is not None  # of a format with scales in the page
    count = -(-(1 << 16) // (stored.stored_size(size) // 2))
    words = (torch.arange(count * (stored.stored_size(size) // 2)).int() & 0xFFFF).view(count, -1)
    elements = words.to(torch.uint16).view(torch.uint8).view(stored.dtype)
    scale = torch.ones(count, 1, dtype=stored.scale_dtype)
    wanted = stored.load(elements, scale)
    parts = range(16 // stored.bits)
    found = torch.stack([numbers_of(stored.number, words, part).float() for part in parts], -1)
    found = found.flatten(1)
    valid = wanted.isfinite()
    if not torch.equal(found[valid], wanted[valid]):
        return "the device function gives other numbers than decode with a scale of 1"
    for factor in (2.0**-7, 3.0):
        scaled, expected = stored.load(elements, scale * factor), wanted * factor
        if not torch.allclose(scaled[valid], expected[valid], rtol=1e-5, atol=0.0):
            return f"decode does not multiply numbers by a scale of {factor}, as kernels do"
    if bool((found[valid].abs() >= 2.0**15).any()):
        return "the device function gives numbers of 2^15 and more, which float16 products exceed"
    return ""


def _cases(check: Callable[[KVFormat, int], str], target: BackendUnderTest) -> Iterator[CheckCase]:
    assert target.kv_format is not None  # the only caller names one
    stored = load_kv_format(target.kv_format)

    def run(size: int) -> str:
        message = check(stored, size)
        return f"{message} (P16) | {stored.name}, head size {size}" if message else ""

    if check is _check_device and stored.number is None:
        return
    for size in head_sizes(stored, (64, 96) if target.quick else _SIZES):
        yield CheckCase(f"head-{size}", partial(run, size))


def _check(name: str, title: str, check: Callable[[KVFormat, int], str]) -> Check:
    return Check(name, title, partial(_cases, check))


NUMBER_CHECKS = (
    _check("KV1", "stored sizes and dtypes are the declared ones", _check_sizes),
    _check("KV2", "equal heads give equal bytes", _check_repeatable),
    _check("KV3", "the bytes of a head do not depend on other heads", _check_alone),
    _check("KV4", "decoding reads the bytes of a head only", _check_bytes_only),
    _check("KV5", "pages and heads of zeros; pages of any bytes", _check_zeros),
    _check("KV6", "a NaN stays visible, in its head", _check_nan),
    _check("KV7", "infinities and large numbers saturate", _check_saturation),
    _check("KV8", "the error is within the stated bound", _check_error),
    _check("KV14", "the device function gives the numbers of decode", _check_device),
)
