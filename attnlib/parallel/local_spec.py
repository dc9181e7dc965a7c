"""What a rank computes over its part of the keys, as a spec that any backend can serve (X4, X5).

The keys of a rank are not at the positions that a kernel would count, so its part is attention to
the keys of another sequence: each row sees a range of local indices, which follows from the
positions of the request. The end of a range is a sequence length. Its beginning is cut at a block
of the table; the keys before it in that block are hidden by a window, where all ranges are equally
long, or by a score function.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from attnlib.errors import UnsupportedConfigError
from attnlib.parallel.divisions import Division, Interleaved
from attnlib.score_functions.function import ScoreFunction
from attnlib.score_functions.operators import lookup, minimum, where
from attnlib.spec import AttentionSpec, AttentionType, MaskKind, Window

__all__ = ["Edge", "LocalForm", "local_form", "rejections"]

_MASKS = (MaskKind.CAUSAL, MaskKind.BIDIRECTIONAL)


class Edge(Enum):
    """How a row finds the first key that it sees."""

    START = "the first key of its table"
    WINDOW = "a window of local keys"
    FUNCTION = "a score function"


class LocalForm(NamedTuple):
    """The part of one rank.

    Attributes:
        spec: over the cache of the rank, with the query heads of all ranks.
        edge: see `Edge`.
        reach: `(before, after)`, positions that a query sees besides its own; None is unbounded.
        chunk: positions per attention chunk; 0 is none.
        by_row: every token is a request of its own, because rows of a request see other ranges.
        is_decoder: the spec is one of a decoder, which cannot have a token without keys.
    """

    spec: AttentionSpec
    edge: Edge
    reach: tuple[int | None, int | None]
    chunk: int
    by_row: bool
    is_decoder: bool = False

    def for_decoders(self) -> LocalForm:
        """The same part for backends that serve decoders only: requests of one token, whose causal
        mask hides no key."""
        window = self.spec.window
        spec = self.spec.replace(
            attn_type=AttentionType.DECODER,
            mask_kind=MaskKind.CAUSAL,
            window=None,
            sliding_window=None if window is None else (window.left or 0) + 1,
        )
        return self._replace(spec=spec, is_decoder=True)

    @property
    def cuts(self) -> bool:
        """Whether rows do not begin at the first key of their request."""
        return self.reach[0] is not None or self.chunk > 0

    def longest_range(self, division: Division) -> int:
        """The most local keys that a row sees where `cuts`."""
        before, after = self.reach
        seen = self.chunk or 1 << 30
        if before is not None:
            seen = min(seen, before + 1 + (1 << 30 if after is None else after))
        if not isinstance(division, Interleaved):
            return seen
        return min(seen, (seen // division.period + 1) * division.run)


def rejections(spec: AttentionSpec) -> list[str]:
    """Why layers of this kind cannot attend over divided keys; empty if they can."""
    features = {
        "attn_type": None if spec.attn_type is AttentionType.DECODER else spec.attn_type.value,
        "mask_kind": None if spec.mask_kind in _MASKS else spec.mask_kind.value,
        "score_function": spec.score_function,
        "key_selection": spec.key_selection,
        "compressed_entries": spec.compressed_entries,
    }
    reasons = [
        f"{name}={value} counts positions or lists that a rank does not have"
        for name, value in features.items()
        if value is not None
    ]
    if spec.token_sinks:
        reasons.append("token_sinks=True: calls of divided layers take no tensors of query tokens")
    return reasons


def local_form(spec: AttentionSpec, division: Division, rank: int) -> LocalForm:
    """The form of a rank's part.

    Args:
        spec: of the layer, with the query heads of this rank.
        division: of the cache.
        rank: in the group.

    Raises:
        UnsupportedConfigError: the layer cannot be divided; with all reasons.
    """
    if reasons := rejections(spec):
        raise UnsupportedConfigError(
            f"context parallelism: {'; '.join(reasons)}: run this layer on one rank",
            reasons=reasons,
        )
    chunk, window = spec.attention_chunk_size or 0, spec.visible_window
    after = 0 if spec.is_causal else window.right
    reach = (window.left, after)
    edge = _edge(spec, division, reach, chunk)
    function = _score_function(spec, division, rank) if edge is Edge.FUNCTION else None
    fixed = None
    if edge is Edge.WINDOW:
        assert window.left is not None
        fixed = Window((window.left + 1) // division.world_size - 1, None)
    local = spec.replace(
        num_heads=spec.num_heads * division.world_size,
        attn_type=AttentionType.ENCODER_DECODER,
        mask_kind=MaskKind.BIDIRECTIONAL,
        sliding_window=None,
        window=fixed,
        attention_chunk_size=None,
        has_alibi=False,
        has_sink=False,
        score_function=function,
        kv_sharing=False,
        needs_lse=True,
    )
    # A causal mask is known from the batch; a window that ends at the query without one is not.
    limited = reach[0] is not None or chunk > 0 or (after is not None and not spec.is_causal)
    by_row = limited or spec.has_alibi or (spec.batch_invariant and spec.is_causal)
    return LocalForm(local, edge, reach, chunk, by_row)


def _edge(
    spec: AttentionSpec, division: Division, reach: tuple[int | None, int | None], chunk: int
) -> Edge:
    before = reach[0]
    if spec.has_alibi or (before is not None and chunk):
        return Edge.FUNCTION
    if chunk:
        if isinstance(division, Interleaved):
            step, whole = chunk // division.world_size, chunk % division.period == 0
        else:
            step, whole = chunk, division.run_length % spec.block_size == 0
        return Edge.START if whole and step % spec.block_size == 0 else Edge.FUNCTION
    if before is None:
        return Edge.START
    equal = isinstance(division, Interleaved) and (before + 1) % division.period == 0
    return Edge.WINDOW if equal and spec.is_causal else Edge.FUNCTION


def _score_function(spec: AttentionSpec, division: Division, rank: int) -> ScoreFunction:
    """Hides the keys before the range of a row, and adds ALiBi by positions of the request."""
    if not spec.has_alibi:
        return ScoreFunction(_hide, batch_tensors=("row",), bounds=_visible, exact_bounds=True)
    size, count = division.gaps(rank)
    start = division.position(0, rank)
    constants = {"run": division.run_length, "start": start, "gap": size, "gaps": count}
    return ScoreFunction(
        _biased,
        constants=tuple(constants.items()),
        layer_tensors=("slope",),
        batch_tensors=("row",),
        bounds=_biased_range,
    )


def _hide(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return where(k_pos < lookup(aux.row, request, 0), float("-inf"), score)


def _visible(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    first = lookup(aux.row, request, 0)
    return first, seq_len, first, seq_len


def _biased(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    local = k_pos + lookup(aux.row, request, 1)
    key = local + aux.start + minimum(local // aux.run, aux.gaps) * aux.gap
    score = score - lookup(aux.slope, head) * abs(lookup(aux.row, request, 2) - key)
    return where(k_pos < lookup(aux.row, request, 0), float("-inf"), score)


def _biased_range(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    return lookup(aux.row, request, 0), seq_len, 0, 0
