"""Compiled libraries with zeros in place of what a Hopper GPU does not load (`pack.py`)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

__all__ = ["shrink"]

_MAGIC = struct.pack("<I", 0xBA55ED50)
"""What a fat binary begins with."""
_MACHINE_CODE, _HOPPER = 2, 90
_OTHER = 120
"""An architecture of which a Hopper GPU takes no code: not to be loaded, nor compiled from PTX."""
_ALLOCATED, _NOTES, _NO_BITS = 2, 7, 8
_KERNEL = re.compile(rb"\.text\.(_ZN7cutlass13device_kernel\w+)")
_SOFT_CAP = re.compile(rb"4Sm90ELb[01]ELb[01]ELb1E")
"""The third flag of a prefill or decode of FlashAttention 3."""


def shrink(library: bytes) -> bytes:
    """A library of the same size that loads as before on a Hopper GPU, with zeros in place of what
    is not loaded there."""
    if library[:4] != b"\x7fELF":
        return library
    result = bytearray(library)
    (start,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    for number in range(count):
        row = struct.unpack_from("<IIQQQQ", library, start + number * size)
        _, kind, flags, _, offset, length = row
        if kind not in (0, _NOTES, _NO_BITS) and not flags & _ALLOCATED and number != names:
            result[offset : offset + length] = bytes(length)
    for architecture, offset, length, is_hopper in _device_code(library):
        if not is_hopper or _has_soft_caps(library, offset, length):
            result[offset : offset + length] = bytes(length)
            struct.pack_into("<I", result, architecture, _OTHER)
    return bytes(result)


def _device_code(library: bytes) -> Iterator[tuple[int, int, int, bool]]:
    """The parts of fat binaries: where they name their architecture, offset and length of their
    content, and whether it is machine code for Hopper."""
    position = library.find(_MAGIC)
    while position >= 0:
        version, header, length = struct.unpack_from("<HHQ", library, position + len(_MAGIC))
        part, end = position + header, position + header + length
        if (version, header) != (1, 16) or end > len(library):  # these bytes are something else
            position = library.find(_MAGIC, position + 8)
            continue
        while part < end:
            kind, _, header, content = struct.unpack_from("<HHIQ", library, part)
            (architecture,) = struct.unpack_from("<I", library, part + 28)
            is_hopper = (kind, architecture) == (_MACHINE_CODE, _HOPPER)
            yield part + 28, part + header, content, is_hopper
            part += header + content
        position = library.find(_MAGIC, end)


def _has_soft_caps(library: bytes, offset: int, length: int) -> bool:
    """Whether all kernels in machine code are those of FlashAttention 3 with a soft cap."""
    found = _KERNEL.findall(library, offset, offset + length)
    kernels = [name for name in found if b"CollectiveMainloopFwdSm90" in name]
    return bool(kernels) and all(_SOFT_CAP.search(name) for name in kernels)
