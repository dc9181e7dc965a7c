"""Exchanges by memory that cannot end, on one GPU in one process; run by `test_exchange_errors.py`.

    python -m tests.gpu.exchange_errors queries|results|streams

The context of CUDA is lost afterwards. Prints what the engine's next wait for the GPU raises, and
what the next exchange raises; the log goes to the standard error.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch

from attnlib.errors import AttnlibError
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.triton.peer_words import merge_words, share_words
from attnlib.parallel.peers import report

TOKENS, HEADS, SIZE = 3, 4, 128


class Rank:
    """One of two ranks, with buffers and a stream of its own."""

    def __init__(self, buffers: list[torch.Tensor], rank: int) -> None:
        self.peers = PeerBuffers.of(buffers, rank, limit=timedelta(seconds=1))
        self.stream = torch.cuda.Stream()
        heads = HEADS * len(buffers)
        self.query = torch.randn(TOKENS, HEADS * SIZE, device="cuda").bfloat16()
        self.states = [
            torch.randn(TOKENS, x, SIZE, device="cuda").bfloat16() for x in (heads, HEADS)
        ]
        self.lses = [torch.randn(TOKENS, x, device="cuda") for x in (heads, HEADS)]

    def queries(self, stream: torch.cuda.Stream | None = None) -> None:
        with torch.cuda.stream(stream or self.stream):
            share_words(self.query, self.peers)

    def results(self) -> None:
        (partial, out), (partial_lse, lse) = self.states, self.lses
        states = partial, partial_lse, out, lse, self.peers
        with torch.cuda.stream(self.stream):
            merge_words(*states, num_kv_heads=1, sinks=None)


def main(case: str) -> None:
    buffers = [
        torch.zeros(PeerBuffers.num_bytes(), dtype=torch.uint8, device="cuda") for _ in range(2)
    ]
    first, second = (Rank(buffers, rank) for rank in range(2))
    side = torch.cuda.Stream()
    for stream in (first.stream, second.stream, side):  # memory, before kernels wait
        with torch.cuda.stream(stream):
            torch.empty(1 << 20, device="cuda")
    torch.cuda.synchronize()
    for rank in (first, second):
        rank.queries()
    for rank in (first, second):
        rank.results()
    torch.cuda.synchronize()
    print("one exchange of both ranks", flush=True)
    report(first.peers, first)
    if case == "streams":
        first.queries()
        first.queries(side)
        second.queries()
    else:
        getattr(first, case)()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("CUDA:", str(error).partition("\n")[0], flush=True)
    try:
        first.queries()
    except AttnlibError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)  # nothing can be freed


if __name__ == "__main__":
    main(sys.argv[1])
