"""Instructions of `unpack_ptx`, `number_ptx` and `lookup_ptx` on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

__all__ = ["emulate", "floats"]


def floats(bits: int) -> torch.Tensor:
    halves = torch.tensor([bits & 0xFFFF, bits >> 16]).to(torch.uint16)
    return halves.view(torch.float16).double()


def _pair(exact: torch.Tensor) -> int:
    """Two numbers, each rounded once: float64 holds products of float16 and their sums."""
    low, high = exact.half().view(torch.uint16).tolist()
    return int(low | high << 16)


def _integer(name: str, x: list[int]) -> int:
    """The result of an integer instruction."""
    if name == "prmt.b32":
        pool = x[0].to_bytes(4, "little") + x[1].to_bytes(4, "little")
        selected = [x[2] >> (4 * n) & 15 for n in range(4)]
        signs = bytes(255 * (byte >> 7) for byte in pool)  # for which bit 3 asks
        return int.from_bytes(bytes((pool + signs)[n] for n in selected), "little")
    if name == "lop3.b32":
        found = {0xEA: (x[0] & x[1]) | x[2], 0xF8: x[0] | (x[1] & x[2]), 0x6A: (x[0] & x[1]) ^ x[2]}
        found |= {0x28: (x[0] ^ x[1]) & x[2], 0xD8: (x[0] & ~x[2]) | (x[1] & x[2])}
        return found[x[3]]
    if name == "shr.u32":
        return x[0] >> x[1]
    if name == "mad.lo.u32":
        return (x[0] * x[1] + x[2]) & 0xFFFFFFFF
    if name in ("shl.b32", "mul.lo.u32"):
        return (x[0] << x[1] if name == "shl.b32" else x[0] * x[1]) & 0xFFFFFFFF
    if name == "and.b32":
        return x[0] & x[1]
    assert name in ("mov.b32", "mov.u32", "xor.b32"), name
    return x[0] ^ x[1] if name == "xor.b32" else x[0]


def emulate(
    code: str,
    word: int,
    symbols: Mapping[str, int] | None = None,
    memory: Callable[[int], int] | None = None,
) -> list[int]:
    """Run the instructions of `unpack_ptx` on one register; returns the pairs of all parts.

    Args:
        code: PTX code.
        word: the register.
        symbols: special registers and addresses by name.
        memory: the 32 bits at an address of shared memory.
    """
    registers: dict[str, int] = {"$4" if "$3" in code else "$2": word, **(symbols or {})}
    outputs: dict[int, int] = {}
    for text in code[1:-1].split(";"):
        name, _, rest = text.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if rest.startswith("{i, j}"):
            source = registers[rest.rpartition(", ")[2]]
            registers |= {"i": source & 0xFFFF, "j": source >> 16}
            continue
        target, *given = (part.strip() for part in rest.split(","))
        if name == "ld.shared.b32":
            assert memory is not None
            registers[target] = memory(registers[given[0].strip("[]")])
            continue
        x = [registers[part] if part in registers else int(part, 0) for part in given]
        if name == "cvt.rn.f16x2.e4m3x2":
            stored = torch.tensor([x[0] & 0xFF, x[0] >> 8], dtype=torch.uint8)
            registers[target] = _pair(stored.view(torch.float8_e4m3fn).double())
        elif name.endswith(".f16x2"):
            a, b, *c = map(floats, x)
            exact = {"add": a + b, "sub": a - b}.get(name[:3], a * b)
            registers[target] = _pair(exact + c[0] if c else exact)
        else:
            registers[target] = _integer(name, x)
        if target.startswith("$"):
            outputs[int(target[1:])] = registers[target]
    return [outputs[part] for part in sorted(outputs)]
