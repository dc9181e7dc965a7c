"""Which shared prefixes are computed once, and in which parts: plain functions of host values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnlib.metadata.shared_prefix import SharedPrefix
from attnlib.spec import AttentionSpec, AttentionType

__all__ = [
    "DEFAULT_RULE",
    "PrefixPart",
    "PrefixRule",
    "not_shared_reason",
    "prefix_parts",
    "worthwhile",
]


@dataclass(frozen=True)
class PrefixRule:
    """When a prefix is computed once for all its requests.

    Attributes:
        min_saved_bytes: keys and values that all requests of a batch together need not read again.
            Below it, the launches that prefixes add cost more than the reads that they save.
        min_part_tokens: shortest part into which a prefix is split.
        parts_per_sm: parts of all prefixes, in units of thread blocks per multiprocessor.
    """

    min_saved_bytes: int = 64 << 20
    min_part_tokens: int = 512
    parts_per_sm: float = 1.0


DEFAULT_RULE = PrefixRule()


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
        (spec.use_mla, "latent caches (MLA) are read by absorbed queries"),
        (spec.batch_invariant, "batch_invariant=True forbids results that depend on other rows"),
    )
    return next((reason for fails, reason in checks if fails), None)


def worthwhile(
    prefixes: Sequence[SharedPrefix], spec: AttentionSpec, rule: PrefixRule
) -> list[SharedPrefix]:
    """The prefixes that are computed once; empty if they save less than `rule` asks.

    A request that a prefix has in common with another prefix reads both parts, so all prefixes of
    a tree count together.
    """
    per_token = spec.num_kv_heads * (spec.head_size + spec.head_size_v) * spec.kv_dtype.itemsize
    saved = sum((len(p.requests) - 1) * (p.end - p.start) * per_token for p in prefixes)
    return list(prefixes) if saved >= rule.min_saved_bytes else []


def prefix_parts(
    prefixes: Sequence[SharedPrefix],
    query_lens: Sequence[int],
    spec: AttentionSpec,
    num_sms: int,
    rule: PrefixRule,
) -> list[PrefixPart]:
    """Split prefixes into parts that fill the GPU, few query rows first.

    `num_sms` is 0 on a device without multiprocessors, where prefixes stay whole.

    A prefix has few rows and many keys. One thread block per tile of rows would use a fraction of
    the multiprocessors, as in decoding; split KV (Flash-Decoding) applies to prefixes too.
    """
    group = spec.num_heads // spec.num_kv_heads
    units = [
        (prefix, spec.num_kv_heads * -(-sum(query_lens[r] for r in prefix.requests) * group // 128))
        for prefix in prefixes
    ]
    target = rule.parts_per_sm * (num_sms or 1)
    work = sum(count * (prefix.end - prefix.start) for prefix, count in units)
    longest = max(rule.min_part_tokens, int(work / target)) if work else rule.min_part_tokens
    block = spec.block_size
    found = []
    for prefix, _ in units:
        tokens = prefix.end - prefix.start
        count = max(1, round(tokens / longest)) if num_sms else 1
        size = -(-tokens // count // block) * block
        found += [
            PrefixPart(prefix.requests, start, min(start + size, prefix.end))
            for start in range(prefix.start, prefix.end, size)
        ]
    return sorted(found, key=lambda part: sum(query_lens[r] for r in part.requests))
