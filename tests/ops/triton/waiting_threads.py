"""Branches of the loops of exchanges by memory that threads could take one by one.

    python -m tests.ops.triton.waiting_threads sm_90

prints a JSON line for each kernel of several warps. Needs a process that does not interpret Triton.
A word of another rank may arrive between the loads of two warps. If they then leave a loop one by
one, they meet at different barriers, and values in shared memory are mixed. A branch may depend on
such a word only through shared memory, from which all threads read the same. Where two warps have
the same words, one of them is asked only, and the other may have older ones.

Nothing but their order in a thread lets words arrive before the other rank waits for the answer:
the machine code must store all of them, whole, before it reads any of another rank.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict

import torch

from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.split_states import SplitStates
from attnlib.ops.triton.peer_words import merge_words, share_words
from tests.ops.triton.cross_compile import stub_target
from tests.ops.triton.sass import disassemble

__all__ = ["divergent_branches"]

_BRANCH = re.compile(r"@!?(%p\d+) bra\s+(\$\w+);")
_WORDS = re.compile(r"isVolatile = true\} : tensor<(\d+x\d+)x!tt\.ptr<i64>, (#\w+)>")
_REGISTER = re.compile(r"%[a-z]+\d+")


def divergent_branches(ptx: str) -> list[str]:
    """The conditional branches in loops that depend on a volatile load past shared memory."""
    lines = [line.strip() for line in ptx.splitlines()]
    places = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L")}
    made_from: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    loops = []
    for at, line in enumerate(lines):
        if jump := re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line):
            if places[jump[1]] < at:
                loops.append(range(places[jump[1]], at + 1))
            continue
        operation = re.sub(r"^@!?%p\d+\s+", "", line)
        target, _, sources = operation.partition("}" if "{" in operation.split(",")[0] else ",")
        name = target.split(None, 1)[0] if target else ""
        for register in _REGISTER.findall(target):
            made_from[register].append((name, _REGISTER.findall(sources)))
    within = sorted({at for loop in loops for at in loop})
    found = [(lines[at], jump[1]) for at in within if (jump := _BRANCH.search(lines[at]))]
    return [line for line, predicate in found if _reads_words(predicate, made_from)]


def _reads_words(predicate: str, made_from: dict[str, list[tuple[str, list[str]]]]) -> bool:
    known, left = {predicate}, [predicate]
    while left:
        for name, sources in made_from[left.pop()]:
            if name.startswith("ld.volatile"):
                return True
            if not name.startswith(("ld.", "atom.")):
                left += set(sources) - known
                known |= set(sources)
    return False


def words_of_two_warps(ttgir: str) -> list[str]:
    """The loads of words `[ranks, words]` that several warps make, by their layout."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>$", ttgir, re.MULTILINE))
    loads, found = _WORDS.findall(ttgir), []
    assert loads, "no words are read"
    for shape, name in loads:
        fields = dict(re.findall(r"(\w+) = \[([\d, ]+)\]", layouts[name]))
        lines = (shape.replace("x", ", "), fields["threadsPerWarp"], fields["warpsPerCTA"])
        sizes = zip(*(map(int, line.split(", ")) for line in lines), strict=True)
        if any(size < threads * warps and warps > 1 for size, threads, warps in sizes):
            found.append(f"{shape}: {layouts[name]}")
    return found


def sent_words(ptx: str) -> int:
    """The stores of words, of 8 bytes or two of them; the record of an error is none."""
    return len(re.findall(r"st\.global\.(?:v2\.)?b64 \[ ", ptx))


def sent_before_waits(code: str) -> int:
    """The stores of as many bytes in machine code before the first read of another rank's word, the
    only loads that are ordered in the system. Error records come after it."""
    sent, reads, _ = code.partition("STRONG.SYS")
    assert reads, "no words are read"
    return len(re.findall(r"\bSTG?\.E\.(?:64|128)\b", sent))


def main(target: str) -> None:
    """Merges of heads of 512 elements, of few words and in float32, by 2 and 4 ranks."""
    bfloat16 = torch.bfloat16
    cases = ((4, bfloat16, 512), (2, bfloat16, 512), (4, torch.float32, 128), (2, bfloat16, 128))
    for world, dtype, size in cases:
        num_bytes = PeerBuffers.num_bytes()
        buffers = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(world)]
        peers = PeerBuffers.of(buffers, 0)
        partial, lse = torch.empty(2, 2 * world, size, dtype=dtype), torch.empty(2, 2 * world)
        states = partial, lse, partial[:, :2].contiguous(), lse[:, :2].contiguous()
        with stub_target(target) as launches:
            share_words(partial[:, :2].reshape(4, -1), peers)
            merge_words(*states, peers, num_kv_heads=1, sinks=None)
            splits = SplitStates.of(2, 1, partial.device)
            merge_words(*states, peers, num_kv_heads=1, sinks=None, splits=splits)
            for kernel in (launch.kernel for launch in launches):
                found = divergent_branches(kernel.asm["ptx"])
                before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
                row = {
                    "warps": kernel.metadata.num_warps,
                    "loops": "ld.volatile" in kernel.asm["ptx"],
                    "overlaps": bool(wait),
                    "sent": [
                        sent_words(kernel.asm["ptx"]),
                        sent_before_waits(disassemble(kernel.asm["cubin"])),
                    ],
                    "reads_before": bool(wait) and bool(re.search(r"ld\.(global|vol)", before)),
                }
                row["of_two_warps"] = words_of_two_warps(kernel.asm["ttgir"])
                print(json.dumps({"kernel": kernel.metadata.name, **row, "branches": found}))


if __name__ == "__main__":
    main(sys.argv[1])
