"""KV formats with one mistake each, most of them in the format of the example package (P16)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlib.kv_formats import KVFormat
from attnlib.object_path import load_object
from tests.kv_formats.conftest import MODULE
from tests.kv_formats.device_formats import STEPS, decode_steps, encode_steps

__all__ = ["WRONG_FORMATS"]

GOOD: KVFormat = replace(load_object(f"{MODULE}:ROTATED_4BIT"), number=None)
_encode: Any = GOOD.encode
_decode: Any = GOOD.decode
Stored = tuple[Tensor, Tensor]


def _one_scale_per_call(x: Tensor) -> Stored:
    """Prefill, chunk and decode store other bytes."""
    largest = x.square().mean(-1, keepdim=True).sqrt().amax().clamp(min=1e-30)
    numbers = (x / largest * 3.0).round().clamp(-8, 7) + 8
    packed = numbers[:, 0::2].to(torch.uint8) | numbers[:, 1::2].to(torch.uint8) << 4
    return packed, largest.half().expand(len(x), 1).contiguous()


def _random_rounding(x: Tensor) -> Stored:
    """Blocks that are shared and blocks that are computed again differ."""
    return _encode(x + 0.05 * torch.randn_like(x) * x.abs().mean(-1, keepdim=True))


def _hides_nan(x: Tensor) -> Stored:
    return _encode(x.nan_to_num(nan=0.0))


def _overflows(x: Tensor) -> Stored:
    """The norm of a large head is infinite in float16."""
    codes, _ = _encode(x)
    return codes, x.square().mean(-1, keepdim=True).sqrt().half()


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < (size & -size):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.block_diag(*[matrix] * (size // matrix.shape[0]))  # type: ignore[no-untyped-call]


def _rotates_itself(x: Tensor) -> Stored:
    return _encode(x @ _hadamard(x.shape[1]).T)


def _rotates_back(codes: Tensor, scale: Tensor) -> Tensor:
    """Without `1 / sqrt(D)` on either side."""
    x: Tensor = _decode(codes, scale)
    return x @ _hadamard(x.shape[1])


class Remembers:
    """The scale is in a Python attribute: right in one process and call, wrong after a swap."""

    scale = torch.zeros(0, 1)

    def encode(self, x: Tensor) -> Stored:
        codes, self.scale = _encode(x)
        return codes, torch.zeros(len(x), 1, dtype=torch.float16)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        if len(self.scale) < len(codes):
            self.scale = torch.ones(len(codes), 1)
        return _decode(codes, self.scale[: len(codes)])


def _changes_its_input(x: Tensor) -> Stored:
    """The keys of the model, which are attended to and recorded."""
    x.clamp_(-3e4, 3e4)
    x /= x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return _encode(x)


def _changes_the_page(codes: Tensor, scale: Tensor) -> Tensor:
    """A second read gives other numbers."""
    low = codes & 15
    codes >>= 4
    return _decode(low | codes << 4, scale)


def _other_bytes_for_one_head(x: Tensor) -> Stored:
    """A short path for decodes rounds in another way."""
    codes, scale = _encode(x)
    return (codes ^ 1, scale) if len(x) == 1 else (codes, scale)


def _reciprocal(x: Tensor) -> Stored:
    codes, scale = _encode(x)
    return codes, (1.0 / scale.float().clamp(min=1e-4)).half()


def _by_reciprocal(codes: Tensor, scale: Tensor) -> Tensor:
    """A page of zeros has the scale 1 / 0."""
    return _decode(codes, (1.0 / scale.float()))


def _smallest_scale(x: Tensor) -> Stored:
    """A head of zeros becomes small numbers, because no code stands for 0."""
    codes, scale = _encode(x)
    return codes, torch.where(scale.isnan(), scale, scale.clamp(min=1e-3))


def _wraps(x: Tensor) -> Stored:
    """Integers are not saturated: numbers past 127 become negative."""
    has_nan = x.isnan().any(-1, keepdim=True)
    rms = x.nan_to_num().clamp(-1e18, 1e18).square().mean(-1, keepdim=True).sqrt() / 24.0
    numbers = (x.nan_to_num().clamp(-1e18, 1e18) / rms.clamp(min=1e-30)).round().long()
    scale = torch.where(has_nan, torch.nan, rms)
    return ((numbers + 128) % 256 - 128).to(torch.int8), scale


def _nan_everywhere(x: Tensor) -> Stored:
    """One request with a NaN ends all others."""
    codes, scale = _encode(x)
    return codes, scale.clone().fill_(torch.nan) if bool(x.isnan().any()) else scale


def _other_dtype(x: Tensor) -> Stored:
    codes, scale = _encode(x)
    return codes.to(torch.int64), scale


def _reads_the_neighbor(codes: Tensor, scale: Tensor) -> Tensor:
    """A scale that is smoothed over tokens."""
    return _decode(codes, (scale.float() + scale.float().roll(1, 0)) / 2.0)


def _finds_its_scale(codes: Tensor, scale: Tensor) -> Tensor:
    """An index that only stored bytes keep in its range: a fault of the device elsewhere."""
    table = torch.arange(30_001.0)
    place = scale.nan_to_num(0.0).long()
    return _decode(codes, scale) + 0.0 * table[place]


def _other_bytes_for_many_heads(x: Tensor) -> Stored:
    """A path for long prefills."""
    codes, scale = _encode(x)
    return (codes ^ 1, scale) if len(x) > 1000 else (codes, scale)


def _finds_nan_in_whole_groups(x: Tensor) -> Stored:
    """The last elements of a head are in no group."""
    codes, scale = _encode(x.nan_to_num(nan=0.0))
    return codes, torch.where(x[:, :-4].isnan().any(-1, keepdim=True), torch.nan, scale)


def _exponent_wraps(x: Tensor) -> Stored:
    """A byte holds exponents from -110 on: that of a smaller head is one of a large head."""
    has_nan = x.isnan().any(-1, keepdim=True)
    x = x.nan_to_num(0.0).clamp(-1e30, 1e30)
    largest = x.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, (largest / 127.0).log2().ceil(), -100.0)
    numbers = (x * torch.exp2(-exponent)).round().clamp(-127, 127)
    stored = torch.where(has_nan, 255, (exponent.long() + 110) % 255)
    return numbers.to(torch.int8), stored.to(torch.uint8)


def _of_exponents(numbers: Tensor, stored: Tensor) -> Tensor:
    scale = torch.where(stored == 255, torch.nan, torch.exp2(stored.float() - 110.0))
    return numbers.float() * scale


def _root_of_the_scale(x: Tensor) -> Stored:
    codes, scale = encode_steps(x)
    return codes, scale.sqrt()


def _by_the_square(codes: Tensor, scale: Tensor) -> Tensor:
    """Kernels multiply by the scale once."""
    return decode_steps(codes, scale * scale)


def _other_byte(word: Any, part: int) -> Any:
    """The first element is in the high byte."""
    return ((word >> (8 - 8 * part)) & 255) - 128.0


_remembers = Remembers()
_INT8: dict[str, Any] = {
    "dtype": torch.int8, "bits": 8, "scale_dtype": torch.float32, "head_size_multiple": 1,
    "decode": lambda numbers, scale: numbers.float() * scale, "rotated": False, "error": 0.05,
}  # fmt: skip

WRONG_FORMATS: dict[str, tuple[KVFormat, str]] = {
    "one scale per call": (replace(GOOD, encode=_one_scale_per_call), "KV3"),
    "random rounding": (replace(GOOD, encode=_random_rounding), "KV2"),
    "NaN becomes 0": (replace(GOOD, encode=_hides_nan), "KV6"),
    "a float16 norm overflows": (replace(GOOD, encode=_overflows), "KV7"),
    "a rotation without its factor": (
        replace(GOOD, encode=_rotates_itself, decode=_rotates_back), "KV8",
    ),
    "the scale is outside of the page": (
        replace(GOOD, encode=_remembers.encode, decode=_remembers.decode), "KV4",
    ),
    "fewer bytes are declared": (replace(GOOD, bits=2, head_size_multiple=4), "KV1"),
    "the error is larger than stated": (replace(GOOD, error=0.05), "KV8"),
    "encode changes its input": (replace(GOOD, encode=_changes_its_input), "KV2"),
    "decode changes the page": (replace(GOOD, decode=_changes_the_page), "KV4"),
    "other bytes for one head": (replace(GOOD, encode=_other_bytes_for_one_head), "KV3"),
    "a page of zeros is NaN": (
        replace(GOOD, encode=_reciprocal, decode=_by_reciprocal), "KV5",
    ),
    "zeros become small numbers": (replace(GOOD, encode=_smallest_scale), "KV5"),
    "large numbers wrap": (replace(GOOD, encode=_wraps, **_INT8), "KV7"),
    "a NaN in every head": (replace(GOOD, encode=_nan_everywhere), "KV6"),
    "another dtype is returned": (replace(GOOD, encode=_other_dtype), "KV1"),
    "decoding reads the neighbor": (replace(GOOD, decode=_reads_the_neighbor), "KV4"),
    "unused bytes are an index": (replace(GOOD, decode=_finds_its_scale), "KV5"),
    "other bytes for many heads": (replace(GOOD, encode=_other_bytes_for_many_heads), "KV3"),
    "NaN is hidden in the last elements": (
        replace(GOOD, encode=_finds_nan_in_whole_groups), "KV6",
    ),
    "the exponent of a small head wraps": (
        replace(GOOD, encode=_exponent_wraps, **{
            **_INT8, "scale_dtype": torch.uint8, "decode": _of_exponents,
        }), "KV7",
    ),
    "a device function that takes the other byte": (replace(STEPS, number=_other_byte), "KV14"),
    "a scale that kernels do not square": (
        replace(STEPS, encode=_root_of_the_scale, decode=_by_the_square), "KV14",
    ),
    "small heads vanish": (replace(GOOD, span=(2.0**-40, 1.0)), "KV8"),
}  # fmt: skip
"""Name -> the format, and the check that names the mistake."""
