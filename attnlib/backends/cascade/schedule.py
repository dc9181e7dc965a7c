"""Which shared prefixes are computed once, and in which parts: plain functions of host values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from attnlib.metadata.shared_prefix import SharedPrefix
from attnlib.ops.shared_decode import PRODUCT_ROWS, Segment
from attnlib.spec import AttentionSpec, AttentionType

__all__ = [
    "DEFAULT_RULE",
    "EVERY_PREFIX",
    "PrefixPart",
    "PrefixRule",
    "decode_segments",
    "not_shared_reason",
    "prefix_parts",
    "worthwhile",
]


@dataclass(frozen=True)
class PrefixRule:
    """When a prefix is computed once for all its requests, and by which kernels.

    The defaults are from an H200 (`benchmarks/gpu/shared_prefix.py --rule`).

    Attributes:
        min_saved_bytes: keys and values that all requests of a batch together need not read again,
            if prefixes and suffixes are separate launches. Below it, the launches that prefixes add
            cost more than the reads that they save.
        min_saved_bytes_per_token: the same for each query token, in addition: its results are
            written and merged.
        min_saved_bytes_of_decodes: `min_saved_bytes` for decodes of one query token per request
            whose prefixes and suffixes one kernel computes
            (`AttentionMetadataBuilder.shared_decode_shape`).
        min_saved_bytes_per_decode: the same for each query token of these decodes, in addition.
            The following limits do not apply to them, except `captured_parts`.
        max_decode_parts: a prefix whose query rows fit this many decodes is computed by the decode
            kernels, which split its keys over the multiprocessors. Others go to the prefill
            kernels.
        max_decode_rows: query rows of such a decode for each KV head, at most. With more, decode
            kernels are bound by arithmetic, and prefill kernels are faster.
        min_part_tokens: shortest part into which a prefix is split for the prefill kernels.
        parts_per_sm: parts of all prefixes, in units of thread blocks per multiprocessor.
        captured_parts: parts of prefixes in a captured step; 0 captures steps that do not share. A
            graph launches as many for every batch, also for one without prefixes. A captured
            decode that one kernel computes has room for as many prefixes, each of up to 128 query
            rows for each KV head.
    """

    min_saved_bytes: int = 192 << 20
    min_saved_bytes_per_token: int = 5 << 18
    min_saved_bytes_of_decodes: int = 12 << 20
    min_saved_bytes_per_decode: int = 13 << 17
    max_decode_parts: int = 1
    max_decode_rows: int = 32
    min_part_tokens: int = 512
    parts_per_sm: float = 1.0
    captured_parts: int = 0

    def least(self, num_tokens: int, one_kernel: bool) -> int:
        """Bytes that the prefixes of a batch must save.

        Args:
            num_tokens: query tokens of the batch.
            one_kernel: whether one kernel computes its prefixes and suffixes.
        """
        if one_kernel:
            return self.min_saved_bytes_of_decodes + num_tokens * self.min_saved_bytes_per_decode
        return self.min_saved_bytes + num_tokens * self.min_saved_bytes_per_token


DEFAULT_RULE = PrefixRule()
EVERY_PREFIX = PrefixRule(
    min_saved_bytes=0,
    min_saved_bytes_per_token=0,
    min_saved_bytes_of_decodes=0,
    min_saved_bytes_per_decode=0,
)
"""All prefixes are computed once."""

_TILE_ROWS = 128
"""Query rows in a tile of the prefill kernels."""


@dataclass(frozen=True)
class PrefixPart:
    """Tokens `[start, end)` of a shared prefix, which one partial state per query row covers."""

    requests: tuple[int, ...]
    start: int
    end: int


def not_shared_reason(spec: AttentionSpec) -> str | None:
    """Why a layer cannot compute shared prefixes once; None if it can.

    A key of a shared prefix must have the same score for every position of a query: the requests of
    a prefix differ in length.
    """
    checks = (
        (
            spec.attn_type is not AttentionType.DECODER,
            f"attn_type={spec.attn_type.value} has no context of its own tokens",
        ),
        (not spec.visible_window.is_full, "the sliding window hides keys by the query's position"),
        (spec.attention_chunk_size is not None, "attention chunks hide keys by the position"),
        (spec.has_alibi, "ALiBi biases depend on the query's position"),
        (spec.score_function is not None, "the score function may depend on the query's position"),
        (
            spec.compressed_entries is not None,
            "compressed entries are visible by the query's position",
        ),
        (spec.use_mla, "latent caches (MLA) are read by absorbed queries"),
        (spec.batch_invariant, "batch_invariant=True forbids results that depend on other rows"),
    )
    return next((reason for fails, reason in checks if fails), None)


def worthwhile(
    prefixes: Sequence[SharedPrefix], spec: AttentionSpec, min_saved_bytes: int
) -> list[SharedPrefix]:
    """The prefixes that are computed once; empty if they save less than `min_saved_bytes`.

    A request that a prefix has in common with another prefix reads both parts, so all prefixes of
    a tree count together.
    """
    per_token = spec.num_kv_heads * (spec.head_size + spec.head_size_v) * spec.kv_dtype.itemsize
    saved = sum((len(p.requests) - 1) * (p.end - p.start) * per_token for p in prefixes)
    return list(prefixes) if saved >= min_saved_bytes else []


def prefix_parts(
    prefixes: Sequence[SharedPrefix],
    query_lens: Sequence[int],
    spec: AttentionSpec,
    num_sms: int,
    rule: PrefixRule,
    longest_decode: int = 1,
) -> list[PrefixPart]:
    """Split prefixes into parts that fill the GPU, few query rows first.

    A prefix has few rows and many keys. Decode kernels split the keys, but take few rows: such a
    prefix is split by its requests. A prefix of more rows is split by its tokens for the prefill
    kernels; one thread block per tile of rows would use a fraction of the multiprocessors.

    Args:
        prefixes: of the batch.
        query_lens: new tokens of each request.
        spec: of the layers.
        num_sms: multiprocessors; 0 on a device without, where prefixes are not split by tokens.
        rule: limits of the parts.
        longest_decode: the most query tokens of one request in a decode.
    """
    parts: list[PrefixPart] = []
    long = []
    for prefix in prefixes:
        by_requests = _split_requests(prefix, query_lens, longest_decode)
        if by_requests is None or len(by_requests) > rule.max_decode_parts:
            long.append(prefix)
        else:
            parts += by_requests
    parts += _split_tokens(long, query_lens, spec, num_sms, rule)
    return sorted(parts, key=lambda part: sum(query_lens[r] for r in part.requests))


def decode_segments(
    prefixes: Sequence[SharedPrefix],
    query_starts: Sequence[int],
    seq_lens: Sequence[int],
    spec: AttentionSpec,
) -> list[Segment]:
    """The prefixes and the other keys of each request, for requests of at most one query token.

    Args:
        prefixes: of the batch, each after the one that it continues.
        query_starts: [R + 1], the first query token of each request.
        seq_lens: of each request.
        spec: of the layers.
    """
    most = 2 * (PRODUCT_ROWS // spec.group_size)
    covered = [0] * len(seq_lens)
    segments: list[Segment] = []
    for prefix in prefixes:
        tokens = [query_starts[r] for r in prefix.requests if query_starts[r] < query_starts[r + 1]]
        for request in prefix.requests:
            covered[request] = prefix.end
        for first in range(0, len(tokens), most):
            members = tuple(tokens[first : first + most])
            keys = prefix.end - prefix.start
            segments.append(Segment(prefix.requests[0], prefix.start, keys, members))
    for request, (start, end) in enumerate(pairwise(query_starts)):
        if start < end:
            skipped = covered[request]
            segments.append(Segment(request, skipped, seq_lens[request] - skipped, (start,)))
    return segments


def _split_requests(
    prefix: SharedPrefix, query_lens: Sequence[int], longest: int
) -> list[PrefixPart] | None:
    """Parts of at most `longest` query rows with all tokens; None if a request alone has more."""
    groups: list[list[int]] = [[]]
    rows = 0
    for request in prefix.requests:
        if query_lens[request] > longest:
            return None
        if rows + query_lens[request] > longest:
            groups.append([])
            rows = 0
        groups[-1].append(request)
        rows += query_lens[request]
    return [PrefixPart(tuple(group), prefix.start, prefix.end) for group in groups]


def _split_tokens(
    prefixes: Sequence[SharedPrefix],
    query_lens: Sequence[int],
    spec: AttentionSpec,
    num_sms: int,
    rule: PrefixRule,
) -> list[PrefixPart]:
    """Parts of all query rows with some of the tokens."""
    units = [
        spec.num_kv_heads
        * -(-sum(query_lens[r] for r in prefix.requests) * spec.group_size // _TILE_ROWS)
        for prefix in prefixes
    ]
    work = sum(
        count * (prefix.end - prefix.start) for prefix, count in zip(prefixes, units, strict=True)
    )
    longest = max(rule.min_part_tokens, int(work / (rule.parts_per_sm * (num_sms or 1))))
    found = []
    for prefix in prefixes:
        tokens = prefix.end - prefix.start
        # Rounded down: one more part than fits the multiprocessors takes twice the time.
        count = max(1, tokens // longest) if num_sms else 1
        size = -(-tokens // count // spec.block_size) * spec.block_size
        found += [
            PrefixPart(prefix.requests, start, min(start + size, prefix.end))
            for start in range(prefix.start, prefix.end, size)
        ]
    return found
