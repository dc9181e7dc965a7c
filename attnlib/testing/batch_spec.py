"""A short notation for batches, so that a failing case fits in one command line.

A batch is a list of segments joined by `_`. A segment is `[COUNT]qQUERY[sSEQ]`: COUNT requests
(default 1) with QUERY query tokens and a sequence of SEQ tokens. SEQ includes the context and the
query tokens (M1; default QUERY). A number may end in `k`, which multiplies it by 1024. The segment
`padN` adds N token rows past `num_actual_tokens` (M6).

    q2k             one prefill of 2048 tokens
    8q1s1k          eight decodes at 1024 tokens
    2q2k_8q1s1k     two prefills of 2048 tokens and eight decodes in one batch
    3q1s40_2q0s0_pad2   three decodes in a CUDA graph captured for five: two padding requests, two
                        padding rows

The batch without requests is written `empty`. A segment with zero requests is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from attnlib.errors import ContractError

__all__ = ["NAMED_BATCHES", "BatchSpec", "named_batch", "parse_batch", "resolve_batch"]

_SEGMENT = re.compile(r"(?P<count>\d+k?)?q(?P<query>\d+k?)(?:s(?P<seq>\d+k?))?")
_PADDING = re.compile(r"pad(?P<rows>\d+k?)")
_MOST, _MOST_REQUESTS = 2**31 - 1, 2**20
_GRAMMAR = (
    "segments [COUNT]qQUERY[sSEQ] joined by '_', such as 2q2k_8q1s1k; optionally padN; or 'empty'"
)


@dataclass(frozen=True)
class BatchSpec:
    """The lengths of one batch.

    Attributes:
        query_lens: query tokens per request in this step.
        seq_lens: context and query tokens per request. A sequence shorter than its query has rows
            that see no key.
        padding_tokens: token rows past the last request; their slots are -1.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    padding_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.query_lens) != len(self.seq_lens):
            raise ContractError(
                f"query_lens has {len(self.query_lens)} requests and seq_lens has "
                f"{len(self.seq_lens)}; give one of each per request"
            )
        for name, lengths in (("query_lens", self.query_lens), ("seq_lens", self.seq_lens)):
            for request, length in enumerate(lengths):
                if length < 0:
                    raise ContractError(f"{name}[{request}] is {length}; lengths are 0 or more")
        if self.padding_tokens < 0:
            raise ContractError(f"padding_tokens is {self.padding_tokens}; it is 0 or more")

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """The query and the sequence length of each request."""
        return tuple(zip(self.query_lens, self.seq_lens, strict=True))

    @property
    def num_reqs(self) -> int:
        """R, including padding requests."""
        return len(self.query_lens)

    @property
    def num_actual_tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """T: rows of the query tensor, including padding rows."""
        return self.num_actual_tokens + self.padding_tokens

    @property
    def max_query_len(self) -> int:
        """Length of the longest query, 0 for an empty batch."""
        return max(self.query_lens, default=0)

    @property
    def max_seq_len(self) -> int:
        """Length of the longest sequence, 0 for an empty batch."""
        return max(self.seq_lens, default=0)

    def __str__(self) -> str:
        """The batch in the notation of this module; `parse_batch(str(batch)) == batch`."""
        if not self.query_lens and not self.padding_tokens:
            return "empty"
        runs = [(len(list(group)), query, seq) for (query, seq), group in groupby(self.lengths)]
        segments = [
            f"{count if count > 1 else ''}q{query}{'' if seq == query else f's{seq}'}"
            for count, query, seq in runs
        ]
        return "_".join(
            [*segments, *([f"pad{self.padding_tokens}"] if self.padding_tokens else [])]
        )


def _number(text: str) -> int:
    digits = text.removesuffix("k")
    number = int(digits) * (1024 if digits != text else 1) if len(digits) < 16 else _MOST + 1
    if number > _MOST:
        raise ContractError(f"batch spec: {text} is above {_MOST}, the largest number of tokens")
    return number


def parse_batch(text: str) -> BatchSpec:
    """Parse a batch in the notation of this module.

    Raises:
        ContractError: a segment does not parse; the message shows the segment and the grammar.
    """
    if text == "empty":
        return BatchSpec((), ())
    query_lens: list[int] = []
    seq_lens: list[int] = []
    padding = 0
    for segment in text.split("_"):
        if match := _PADDING.fullmatch(segment):
            padding += _number(match["rows"])
            continue
        match = _SEGMENT.fullmatch(segment)
        if match is None:
            raise ContractError(
                f"batch spec {text!r}: segment {segment!r} does not parse; expected {_GRAMMAR}"
            )
        count = _number(match["count"]) if match["count"] else 1
        if count == 0:
            raise ContractError(
                f"batch spec {text!r}: segment {segment!r} has 0 requests; drop it or write 'empty'"
            )
        if len(query_lens) + count > _MOST_REQUESTS:
            raise ContractError(
                f"batch spec {text!r}: more than {_MOST_REQUESTS} requests; write fewer"
            )
        query = _number(match["query"])
        query_lens += [query] * count
        seq_lens += [_number(match["seq"]) if match["seq"] else query] * count
    return BatchSpec(tuple(query_lens), tuple(seq_lens), padding)


NAMED_BATCHES: dict[str, Callable[[int], str]] = {
    "decode": lambda n: f"q1s{2 * n + 3}_q1s{5 * n}_q1s1_q1s{n + 1}",
    "decode_long": lambda n: f"2q1s{40 * n + 5}_q1s7",
    "prefill": lambda n: f"q{2 * n + 5}_q{n}_q3",
    "chunked": lambda n: f"q{n + 3}s{4 * n + 3}_q5s{2 * n + 1}",
    "mixed": lambda n: f"q1s{3 * n + 2}_q{2 * n + 1}_q1s5_q7s{2 * n + 9}",
    "ragged": lambda n: f"q{n + 1}_q1s{n}_q4s{3 * n - 1}_q2s2_q{2 * n - 1}s{2 * n + 6}",
    "verify": lambda n: f"3q4s{3 * n + 2}_q4s4_q4s{n + 1}",
    "page_edges": lambda n: "_".join(
        f"q1s{s}_q3s{s}" for s in (max(n - 1, 3), n, n + 1, 2 * n - 1, 2 * n, 2 * n + 1)
    ),
    "empty_rows": lambda n: f"q0s0_q2s{n + 2}_q0s{n}_q1s{2 * n}_q3s0_q2s1",
    "graph_padding": lambda n: f"q1s{2 * n + 1}_q1s{n}_q1s3_2q0s0_pad2",
    "many_decodes": lambda n: f"67q1s{n + 3}_40q1s{2 * n}_23q1s5",
    "long_keys": lambda n: "q1s4k_q1s7_q2s3k",
    "long_prefill": lambda n: "q1k_q3s9",
    "only_padding": lambda n: "2q0s0_pad3",
    "empty": lambda n: "empty",
}
"""Name -> batch as a function of the block size N, so that lengths fall on block boundaries."""


def named_batch(name: str, block_size: int) -> BatchSpec:
    """One of `NAMED_BATCHES` for a block size.

    Raises:
        ContractError: the name is unknown; the message lists the names.
    """
    if name not in NAMED_BATCHES:
        raise ContractError(f"no batch is named {name!r}; the names are {', '.join(NAMED_BATCHES)}")
    return parse_batch(NAMED_BATCHES[name](block_size))


def resolve_batch(text: str, block_size: int) -> BatchSpec:
    """A batch given by name or in the notation of this module.

    Raises:
        ContractError: the text is neither a known name nor a valid batch.
    """
    if text in NAMED_BATCHES:
        return named_batch(text, block_size)
    try:
        return parse_batch(text)
    except ContractError as error:
        raise ContractError(f"{error}; or a name: {', '.join(NAMED_BATCHES)}") from None
