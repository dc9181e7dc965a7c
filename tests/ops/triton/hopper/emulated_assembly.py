"""The PTX instructions of emulated kernels (`emulate`), told by their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.kernels.page_formats import PAGE_INT4, unpack_ptx
from tests.ops.triton.hopper import emulated_memory
from tests.ops.triton.hopper.emulated_memory import LOCAL
from tests.ops.triton.hopper.emulated_tensors import Tensor, raw

__all__ = ["assembly"]


def _cast_int8(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.uint8).view(torch.int8).to(torch.float16)


def _cast_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float16)


def _cast_e5m2(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.uint8).view(torch.float8_e5m2).to(torch.float16)


def _as_float16(bits: torch.Tensor) -> torch.Tensor:
    """The float16 numbers of the lower 16 bits of integers."""
    return (bits - ((bits & 0x8000) << 1)).to(torch.int16).view(torch.float16)


def _bytes(words: torch.Tensor, cast: Any, alternate: bool, is_pair: bool) -> Any:
    """Two 8-bit elements of each word: the lower and the upper one (alternate), a pair in an int32,
    or those of a word of an even number and of the next one."""
    low, high = cast(words & 0xFF), cast((words >> 8) & 0xFF)
    if alternate:
        return Tensor(low), Tensor(high)
    both = torch.stack((low, high), -1)
    if is_pair:
        return Tensor(both.view(torch.int32).squeeze(-1))
    rows, columns, _ = both.shape
    pairs = both.view(rows, columns // 2, 2, 2)
    return Tensor(pairs[:, :, 0].flatten(1)), Tensor(pairs[:, :, 1].flatten(1))


def _four_bits(asm: str, args: Sequence[Any]) -> Any:
    """Four 4-bit elements of each word; None for other instructions."""
    words = args[0].value.int()
    parts = range(4)
    if asm == unpack_ptx(PAGE_INT4, 90):
        return tuple(Tensor((((words >> 4 * part) & 15) - 8).half()) for part in parts)
    if "0x000F000F" in asm:  # keys: their bits are those of subnormal numbers
        masked = ((words >> 8 * (part // 2)) & (0xF << 4 * (part % 2)) for part in parts)
        return tuple(Tensor(_as_float16(bits)) for bits in masked)
    if "0x0E000E00" in asm:
        scale: Any = 1.0
        if len(args) > 1:
            half, selector = args[1].value.long(), args[2].value.long()
            assert ((selector >> 4) == (selector & 15) + 4).all(), "one byte of two registers each"
            scale = _cast_e4m3((half >> 8 * (selector & 15)) & 0xFF)
        shifted = [words >> 4 * part for part in parts]
        return tuple(Tensor(_as_float16(((n & 8) << 12) | ((n & 7) << 9)) * scale) for n in shifted)
    return None


def assembly(asm: str, constraints: str, args: Sequence[Any], dtype: Any, *_: Any) -> Any:
    """The instructions that the kernels use, by their text."""
    if "griddepcontrol.wait" in asm:
        LOCAL.waited = True
        for write in emulated_memory.LAST_WRITES:
            write()
    if "griddepcontrol" in asm or "prefetch" in asm:
        return Tensor(torch.tensor(0))
    if asm.startswith("bar.sync 11"):
        LOCAL.cta.consumers.wait(emulated_memory.WAIT_SECONDS)
        return Tensor(torch.tensor(0))
    if "st.global" in asm:
        pointers, values, mask = args
        pointers.store(values, mask.to(gl.int1) if isinstance(mask, Tensor) else mask)
        return None
    if asm.startswith("mov.b32 $0, $1"):
        return Tensor(torch.as_tensor(raw(args[0])))
    if "vote.sync.any" in asm and "mul.f32 $0" in asm:  # `lanes.rescale`
        return Tensor(args[0].value * args[1].value)
    if "bar.arrive 14" in asm:  # `instruction_order.before_wait`
        return args[0]
    if "x2.f32 $0, $2, $1" in asm:  # `prefill_products.pack_weights`
        to = torch.bfloat16 if "bf16x2" in asm else torch.float16
        both = torch.stack([word.value.to(to) for word in args], -1)
        return Tensor(both.view(torch.int32).squeeze(-1))
    if "min.NaN.xorsign.abs" in asm:  # magnitudes
        return Tensor(args[0].value.clamp(-raw(args[1]), raw(args[1])))
    if "tanh.approx" in asm:
        return Tensor(torch.tanh(args[0].value))
    if "ex2.approx" in asm:
        return Tensor(torch.exp2(args[0].value))
    if "mul.f32 $1, b, b" in asm:  # of `state_channel_chunks`
        return Tensor(args[0].value.float().square())
    if "lg2.approx" in asm:
        return Tensor(torch.log2(args[0].value))
    if "movmatrix" in asm:
        blocks = args[0].value.reshape(-1, 8, 8).transpose(1, 2)
        return Tensor(blocks.reshape(args[0].value.shape))
    words, is_pair = args[0].value.int(), not isinstance(dtype, tuple)
    if (found := _four_bits(asm, args)) is not None:
        return found
    if "e4m3x2" in asm:
        return _bytes(words, _cast_e4m3, "0x3120" in asm, is_pair)
    if "0x1404" in asm or "0x2404" in asm:
        return _bytes(words, _cast_e5m2, "0x2404" in asm, is_pair)
    if "0x80808080" in asm:
        return _bytes(words, _cast_int8, "0x5240" in asm, is_pair)
    raise NotImplementedError(asm)
