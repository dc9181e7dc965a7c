"""Where the shared memory descriptors of Hopper's asynchronous products come from, in machine code.

A descriptor of wgmma holds the address and the layout of a tile in shared memory. It is a function
of constants, of the program's position and of the pipeline stage, never of kernel arguments or of
values from memory. ptxas 12.8, which Triton 3.6 uses, compiled kernels whose descriptors were made
from registers that held something else: half of the key cache's address, a stride, or nothing.
Such kernels compute wrong results or access illegal addresses, depending on these values.

`descriptor_sources` follows the values of registers through the code (data-flow analysis): where
paths join, a register has the sources of all of them. It knows no more instructions than
descriptors are made of; the result of any other instruction has the sources of all its operands.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from bisect import bisect_right
from heapq import heappop, heappush
from typing import NamedTuple

import triton

__all__ = ["descriptor_sources", "disassemble"]

FORBIDDEN = {"argument", "memory", "undefined"}
"""Sources that a descriptor must not have."""
_ARGUMENTS = 0x210
"""Offset of the kernel arguments in constant bank 0 on Hopper."""
_WORD = 0xFFFFFFFF

_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,6})\*/\s+(?:@!?(U?P[0-9T]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_LABEL = re.compile(r"^(\.L_x_\d+):")
_REGISTER = re.compile(r"(?<![A-Za-z0-9_.])(U?R)(\d+)(?!\w)")
_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')
_PREDICATE = re.compile(r"!?U?P[0-9T]+")
_NO_RESULT = (
    "ST", "RED.", "BAR", "LDGSTS", "LDGDEPBAR", "DEPBAR", "FENCE", "MEMBAR", "WARP", "SYNCS",
    "UTMA", "UBLKCP", "BSSY", "BSYNC", "NOP", "ISETP", "FSETP", "UISETP", "PLOP3", "ELECT", "CCTL",
)  # fmt: skip


class _Value(NamedTuple):
    """A constant, or an unknown number (None), and what it was computed from."""

    number: int | None
    sources: frozenset[str] = frozenset()


class _Instruction(NamedTuple):
    address: str
    predicate: str | None
    name: str
    operands: list[str]


_UNDEFINED = _Value(None, frozenset({"undefined"}))
_State = dict[str, _Value]


@functools.lru_cache(maxsize=1)  # a kernel is searched for several things, one after the other
def disassemble(cubin: bytes) -> str:
    """The machine code of a kernel as text, by the nvdisasm of Triton's wheel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        return subprocess.run(
            [tool, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout


def descriptor_sources(text: str) -> dict[str, set[str]]:
    """Return address of a product -> forbidden sources of its descriptors, for those with some."""
    code, labels = _parse(text)
    ends = sorted({*labels.values(), *(i + 1 for i, c in enumerate(code) if _leaves(c)), len(code)})
    switch = [labels[name] for found in _TARGETS.findall(text) for name in found.split(",")]
    entries: dict[int, _State] = {0: {}}
    blocks, found = [0], dict[str, set[str]]()
    while blocks:
        at = heappop(blocks)  # most paths join behind the blocks that they come from
        state, end, following = dict(entries[at]), ends[bisect_right(ends, at)], list[int]()
        for here in code[at:end]:
            if here.name.startswith("HGMMA"):
                for register in _descriptor_registers(here):
                    sources = state.get(register, _UNDEFINED).sources & FORBIDDEN
                    if sources:
                        found.setdefault(here.address, set()).update(sources)
            if here.name == "BRA":
                following.append(labels[here.operands[-1].strip("`()")])
            elif here.name == "BRX":
                following += switch
            elif not _leaves(here):
                _execute(state, here)
        if end < len(code) and not _always_leaves(code[end - 1]):
            following.append(end)
        for block in following:
            joined = _join(entries[block], state) if block in entries else state
            if joined != entries.get(block):
                entries[block] = dict(joined)
                if block not in blocks:
                    heappush(blocks, block)
    return found


def _leaves(instruction: _Instruction) -> bool:
    return instruction.name in ("BRA", "BRX", "EXIT")


def _always_leaves(instruction: _Instruction) -> bool:
    # A branch with two operands has a condition, too.
    conditional = instruction.predicate is not None or (
        instruction.name == "BRA" and len(instruction.operands) > 1
    )
    return _leaves(instruction) and not conditional


def _join(first: _State, second: _State) -> _State:
    """What registers hold where two paths join."""
    joined = {}
    for register in first.keys() | second.keys():
        one, other = first.get(register, _UNDEFINED), second.get(register, _UNDEFINED)
        if one is not other and one != other:
            same = one.number if one.number == other.number else None
            one = _Value(same, one.sources | other.sources)
        joined[register] = one
    return joined


def _parse(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in text.replace(".reuse", "").splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            operands = [part.strip() for part in re.split(r",(?![^\[]*\])", found[4]) if part]
            code.append(_Instruction(found[1], found[2], found[3], operands))
    return code, labels


def _descriptor_registers(product: _Instruction) -> list[str]:
    """Four uniform registers hold the descriptors of A and B; that of A only if A is in memory."""
    for operand in product.operands:
        if found := re.match(r"gdesc\[UR(\d+)\]", operand):
            first = int(found[1]) + (2 if product.operands[1].startswith("R") else 0)
            return [f"UR{number}" for number in range(first, int(found[1]) + 4)]
    return []


@functools.lru_cache(maxsize=1 << 14)
def _next(register: str, number: int) -> str:
    kind = register.rstrip("0123456789")
    return f"{kind}{int(register.removeprefix(kind)) + number}"


def _width(name: str) -> int:
    """Registers of a result."""
    if ".128" in name or name.endswith(".4"):
        return 4
    return 2 if ".64" in name or ".WIDE" in name or name.startswith("CS2R") else 1


def _value(state: _State, operand: str) -> _Value:
    value = _operand(operand)
    if isinstance(value, list):
        return _Value(None, _union(state.get(register, _UNDEFINED) for register in value))
    if isinstance(value, str):
        value = state.get(value, _UNDEFINED)
    if value.number is None or operand[0] not in "-~":
        return value
    number = -value.number if operand[0] == "-" else ~value.number
    return _Value(number & _WORD, value.sources)


@functools.lru_cache(maxsize=1 << 14)  # instructions are executed once for each path
def _operand(operand: str) -> _Value | str | list[str]:
    """Return a constant without its sign, a register, or the registers of an address."""
    plain = operand.lstrip("-~|").rstrip("|")
    if plain in ("RZ", "URZ", "SRZ"):
        return _Value(0)
    if re.fullmatch(r"0x[0-9a-f]+", plain):
        return _Value(int(plain, 16))
    if re.fullmatch(r"U?R\d+", plain):
        return plain
    if constant := re.match(r"c\[0x0\]\[(0x[0-9a-f]+)\]", plain):
        is_argument = int(constant[1], 16) >= _ARGUMENTS
        return _Value(None, frozenset({"argument"} if is_argument else ()))
    return ["".join(found) for found in _REGISTER.findall(plain)]


def _union(values: object) -> frozenset[str]:
    return frozenset().union(*(value.sources for value in values))  # type: ignore[attr-defined]


def _execute(state: _State, instruction: _Instruction) -> None:
    name, operands = instruction.name, instruction.operands
    while operands and _PREDICATE.fullmatch(operands[0]):
        operands = operands[1:]  # a predicate is a first result
    if not operands:
        return
    if name.startswith(("STL", "LDL")):
        _access_stack(state, name, operands)
        return
    if name.startswith("HGMMA"):
        if operands[0] == "RZ":  # ptxas waits with a product of nothing where a path issued none
            return
        columns = int(re.match(r"HGMMA\.64x(\d+)", name)[1])  # type: ignore[index]
        for number in range(columns // 2):
            state[_next(operands[0], number)] = _Value(None)
        return
    if name.startswith(_NO_RESULT) or not re.fullmatch(r"U?R\d+", operands[0]):
        return
    if name == "UIADD3.64":
        _add_pairs(state, operands)
        return
    values = [_value(state, part) for part in operands[1:] if not _PREDICATE.fullmatch(part)]
    result = _result(name, values, operands)
    for number in range(_width(name)):
        register = _next(operands[0], number)
        if instruction.predicate not in (None, "PT"):
            before = state.get(register, result)
            if before != result:
                state[register] = _Value(None, before.sources | result.sources)
                continue
        state[register] = result


def _result(name: str, values: list[_Value], operands: list[str]) -> _Value:
    """The result of an instruction with one result per register; carries are 0 in descriptors."""
    sources = _union(values)
    if name.startswith(("LDG", "LD.")):
        return _Value(None, frozenset({"memory"}))
    if name.startswith("S2"):
        return _Value(0) if "CgaCtaId" in operands[1] else _Value(None)
    numbers = [value.number for value in values]
    if name.startswith("IMAD") and len(values) == 3 and 0 in numbers[:2]:
        return values[2]  # how ptxas moves between register files
    if name in ("UMOV", "MOV", "R2UR"):
        return values[0]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or name.startswith("IMAD"):
        return _Value(None, sources)
    if name in ("UIADD3", "UIADD3.X", "IADD3", "IADD3.X", "VIADD"):
        return _Value(sum(known) & _WORD, sources)
    if name == "USHF.R.U32.HI":
        return _Value(known[2] >> known[1], sources)
    if name == "USGXT.U32":
        return _Value(known[0] & ((1 << known[1]) - 1), sources)
    if name == "ULEA":
        return _Value(((known[0] << known[2]) + known[1]) & _WORD, sources)
    return _Value(None, sources)


def _add_pairs(state: _State, operands: list[str]) -> None:
    """UIADD3.64 of register pairs and immediate numbers."""
    total, known, sources = 0, True, frozenset[str]()
    for operand in operands[1:]:
        low = _value(state, operand)
        high = _value(state, _next(operand, 1)) if re.match(r"UR\d", operand) else _Value(0)
        sources |= low.sources | high.sources
        known = known and low.number is not None and high.number is not None
        total += (low.number or 0) | (high.number or 0) << 32
    for number, word in enumerate((total & _WORD, total >> 32 & _WORD)):
        state[_next(operands[0], number)] = _Value(word if known else None, sources)


def _access_stack(state: _State, name: str, operands: list[str]) -> None:
    """Spilled registers keep their values."""
    address, register = operands if name.startswith("STL") else reversed(operands)
    place = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", address)
    for number in range(_width(name)):
        slot = f"stack {int(place[1] or '0', 16) + 4 * number}" if place else ""
        if name.startswith("STL"):
            if register != "RZ":
                state[slot] = _value(state, _next(register, number))
            else:
                state[slot] = _Value(0)
        else:
            state[_next(register, number)] = state.get(slot, _UNDEFINED if slot else _Value(None))
