"""The same requests in other batches: what a batch-invariant backend must not depend on (M15).

Each function yields variants of a batch. Rows of a variant are tokens of requests of the whole
batch, so they must have the bits of these tokens when the request is alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attnlib.testing.batch_slicing import slice_batch
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.materialized_case import MaterializedCase

__all__ = ["KINDS", "BatchVariant", "hidden_memory", "variants_of"]

KINDS = (
    "repeated calls", "batch composition", "position in the batch", "lengths of other requests",
    "size of the batch", "chunks", "padding", "memory of other requests", "CUDA graphs",
)  # fmt: skip
"""What is varied."""

_SINGLE_TOKENS = 6
"""Tokens of a prompt that are also computed as a chunk of one token."""


@dataclass(frozen=True)
class BatchVariant:
    """A batch made of tokens of other requests.

    Attributes:
        kind: what is varied, one of `KINDS`.
        label: description for a failure.
        step: the batch.
        parts: (request, first token, end) of the rows of each request of the batch, in order.
        hidden_from: the request whose memory alone is valid; None where all memory is.
    """

    kind: str
    label: str
    step: MaterializedCase
    parts: tuple[tuple[int, int, int], ...]
    hidden_from: int | None = None


def variants_of(
    step: MaterializedCase, seed: int, largest_batch: int, chunks: Sequence[int]
) -> Iterator[BatchVariant]:
    """All variants of a batch but those of CUDA graphs.

    Args:
        step: the batch, whose new tokens are in the cache.
        seed: of random choices.
        largest_batch: requests of the largest batch, which repeats requests.
        chunks: lengths of the chunks that prompts are cut into, besides 1.
    """
    draw, lens = random.Random(seed), step.inputs.batch.query_lens
    every = list(range(len(lens)))

    def variant(kind: str, label: str, requests: Sequence[int], **more: Any) -> BatchVariant:
        parts = tuple((r, 0, lens[r]) for r in requests)
        return BatchVariant(kind, label, slice_batch(step, requests), parts, **more)

    for request in every:
        yield variant("repeated calls", f"request {request} alone, again", [request])
    yield variant("batch composition", "all requests", every)
    for _ in range(3):
        chosen = sorted(draw.sample(every, draw.randint(2, max(2, len(every) - 1))))
        yield variant("batch composition", f"requests {chosen}", chosen)
    yield variant("position in the batch", "reversed", every[::-1])
    for shift in (1, len(every) // 2):
        order = every[shift:] + every[:shift]
        yield variant("position in the batch", f"requests in the order {order}", order)
    for request in every:
        yield _shortened(step, request, draw)
    decodes = [r for r in every if lens[r] == 1]
    for size in sorted({2, largest_batch // 8, largest_batch}):
        for request in decodes[-2:]:
            others = [r for r in every if r != request]
            half = len(others) // 2
            order = [*others[:half], *[request] * size, *others[half:]]
            label = f"request {request} {size} times, with all others"
            yield variant("size of the batch", label, order)
            label = f"request {request} {size} times"
            yield variant("size of the batch", label, [request] * size)
    yield from _chunked(step, chunks)
    for requests, rows in ((1, 0), (0, 3), (5, 7)):
        for order in (every, every[-1:]):
            whole = variant("padding", f"{requests} requests and {rows} rows", order)
            yield replace(whole, step=_padded(whole.step, requests, rows))
    for request in every:
        label = f"NaN in the memory of all but request {request}"
        yield variant("memory of other requests", label, every, hidden_from=request)


def _shortened(step: MaterializedCase, request: int, draw: random.Random) -> BatchVariant:
    """All requests, where all but one have fewer new tokens; those of one token are left out."""
    lens = step.inputs.batch.query_lens
    requests = [r for r in range(len(lens)) if r == request or lens[r] > 1]
    spans = [(0, lens[r]) if r == request else (0, draw.randint(1, lens[r] - 1)) for r in requests]
    parts = tuple((r, *span) for r, span in zip(requests, spans, strict=True))
    label = f"request {request} with requests of {[b for _, b in spans]} new tokens"
    return BatchVariant(
        "lengths of other requests", label, slice_batch(step, requests, spans), parts
    )


def _chunked(step: MaterializedCase, chunks: Sequence[int]) -> Iterator[BatchVariant]:
    lens = step.inputs.batch.query_lens
    others = [r for r in range(len(lens)) if lens[r] == 1][:2]
    for request, length in enumerate(lens):
        if length == 1:
            continue
        spans = [
            (first, min(first + chunk, length))
            for chunk in chunks
            for first in range(0, length, chunk)
            if chunk < length
        ]
        distance = max(1, length // _SINGLE_TOKENS)
        spans += [(t, t + 1) for t in sorted({*range(0, length, distance), length - 1})]
        for number, span in enumerate(spans):
            # Every other chunk is computed with decodes.
            decodes = others if number % 2 else []
            requests = [*decodes, request]
            every_span = [*((0, 1) for _ in decodes), span]
            parts = tuple((r, *s) for r, s in zip(requests, every_span, strict=True))
            label = f"tokens {span[0]} to {span[1]} of request {request} with requests {decodes}"
            yield BatchVariant("chunks", label, slice_batch(step, requests, every_span), parts)


def _padded(step: MaterializedCase, requests: int, rows: int) -> MaterializedCase:
    """The batch with empty requests and rows past its end, which hold NaN (M6, M7)."""
    inputs, batch = step.inputs, step.inputs.batch
    smaller = BatchSpec(
        (*batch.query_lens, *[0] * requests), (*batch.seq_lens, *[0] * requests), rows
    )

    def extended(tensor: torch.Tensor, count: int, value: float) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((count, *tensor.shape[1:]), value)])

    starts, nan = inputs.query_start_loc, float("nan")
    return replace(
        step,
        inputs=replace(
            inputs,
            batch=smaller,
            placement=replace(
                inputs.placement, blocks=(*inputs.placement.blocks, *[()] * requests)
            ),
            query=extended(inputs.query, rows, nan),
            key=extended(inputs.key, rows, nan),
            value=extended(inputs.value, rows, nan),
            out=extended(inputs.out, rows, nan),
            block_table=extended(inputs.block_table, requests, 0),
            query_start_loc=extended(starts, requests, int(starts[-1])),
            seq_lens=extended(inputs.seq_lens, requests, 0),
            slot_mapping=extended(inputs.slot_mapping, rows, -1),
        ),
    )


@contextmanager
def hidden_memory(step: MaterializedCase, request: int, value: float) -> Iterator[None]:
    """Fill all cache blocks and new tokens of other requests with `value` inside the block."""
    inputs = step.inputs
    others = [b for r, blocks in enumerate(inputs.placement.blocks) if r != request for b in blocks]
    own = set(inputs.placement.blocks[request])
    index = torch.tensor([b for b in others if b not in own], device=inputs.query.device)
    first = sum(inputs.batch.query_lens[:request])
    rows = torch.ones(inputs.query.shape[0], dtype=torch.bool, device=inputs.query.device)
    rows[first : first + inputs.batch.query_lens[request]] = False
    restore: list[Callable[[], object]] = []
    chosen = ((inputs.cache.key, index), (inputs.cache.value, index), (inputs.query, rows))
    for tensor, where in chosen:
        filler: float = value
        if tensor.element_size() == 1:  # float8 cannot be indexed
            tensor, filler = tensor.view(torch.uint8), 0x7F
        saved = tensor[where]
        restore.append(partial(tensor.__setitem__, where, saved))
        tensor[where] = filler
    try:
        yield
    finally:
        for undo in restore:
            undo()
