"""Cases of divided layers, by name; each is a function of a `RankGroup` that returns what is wrong.

`WRONG` are implementations with one error each, under which a case must find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

import attnlib
from attnlib.backends.composite import make_composite
from attnlib.backends.torch import TorchBackend
from attnlib.errors import ContractError
from attnlib.ops.torch.softmax import add_sink
from attnlib.parallel import (
    Contiguous,
    ParallelAttention,
    RankGroup,
    ZigZag,
    divided_batch,
    exchange,
    local_spec,
    merge,
)
from attnlib.parallel.exchange import Exchange
from attnlib.spec import AttentionType, Window
from tests.parallel.problem import BLOCK, STEPS, Problem, Run, error_of
from tests.testing.toy_backend import ToyBackend, ToyBuilder, toy_with

LIMIT = 2e-6
"""Of outputs and LSEs in float32: a few roundings of numbers of about 3."""
LATENT = {"num_kv_heads": 1, "head_size": 24, "head_size_v": 16, "use_mla": True}
FULL = {"mask_kind": "bidirectional"}
GROWING = ("prefill", "mixed", "decode")


def runs_of(span: int) -> Callable[[int], Contiguous]:
    return partial(Contiguous, span=span)


class DecodesOnlyBuilder(ToyBuilder):
    """Of a backend that serves requests of one token only."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        common = common_attn_metadata
        assert common.max_query_len <= 1 and bool((common.seq_lens > 0).all())
        return super().build(common_prefix_len, common, fast_build)


DecodesOnly = toy_with(builder=DecodesOnlyBuilder, attn_types=(AttentionType.DECODER,))
DECODERS: dict[str, tuple[Any, ...]] = {
    "sinks, soft cap": ({"has_sink": True, "logits_soft_cap": 3.0},),
    "window of whole periods": ({"sliding_window": 12},),
    "window, alibi": ({"sliding_window": 5, "has_alibi": True}, 2),
    "bidirectional": (FULL, 1, None, GROWING),
    "latents": (LATENT,),
}
"""Layers of a backend without attention to the keys of another sequence."""

PROBLEMS = {
    "grouped heads": Problem(),
    "runs of a block": Problem(run=BLOCK),
    "runs of 3": Problem(run=3),
    "contiguous": Problem(division=runs_of(9)),
    "zigzag": Problem(division=partial(ZigZag, span=4)),
    "zigzag: window": Problem({"sliding_window": 7}, division=partial(ZigZag, span=3)),
    "zigzag: chunks of whole blocks": Problem(
        {"attention_chunk_size": 8}, division=partial(ZigZag, span=4)
    ),
    "zigzag: alibi": Problem({"has_alibi": True}, division=partial(ZigZag, span=3)),
    "window of whole periods": Problem({"sliding_window": 12}),
    "window": Problem({"sliding_window": 5}, run=2),
    "window, contiguous": Problem({"sliding_window": 5}, division=runs_of(9)),
    "chunks of whole blocks": Problem({"attention_chunk_size": 48}),
    "chunks": Problem({"attention_chunk_size": 8}),
    "chunks, contiguous": Problem({"attention_chunk_size": 8}, division=runs_of(8)),
    "alibi": Problem({"has_alibi": True}, run=2),
    "alibi, contiguous": Problem({"has_alibi": True}, division=runs_of(9)),
    "sinks": Problem({"has_sink": True}),
    "sinks, soft cap, window": Problem(
        {"has_sink": True, "logits_soft_cap": 3.0, "sliding_window": 7}
    ),
    "latents": Problem(LATENT),
    "latents in fp8, window": Problem(
        {**LATENT, "kv_cache_dtype": "fp8", "sliding_window": 5}, scales=0.25
    ),
    "fp8": Problem({"kv_cache_dtype": "fp8"}, scales=0.5),
    "scales in the page": Problem({"kv_cache_dtype": "int8_per_token_head"}),
    "rotated heads": Problem({"kv_cache_dtype": "fp8", "kv_rotation": "hadamard"}, scales=0.5),
    "values of another format": Problem(
        {"kv_cache_dtype": "int8_per_token_head", "value_cache_dtype": "int4_per_group"}
    ),
    "reduce-scatter": Problem({"has_sink": True}, options={"exchange": "reduce_scatter"}),
    "bidirectional": Problem(FULL, steps=GROWING),
    "bidirectional window": Problem({**FULL, "sliding_window": 5}, steps=GROWING),
    "bidirectional window to the query": Problem(
        {**FULL, "window": Window(None, 0)}, steps=GROWING
    ),
    "batch invariant": Problem({"batch_invariant": True}),
    **{
        f"decoders only: {name}": Problem(*more, options={"backend": ToyBackend})
        for name, more in DECODERS.items()
    },
    "decodes only": Problem(options={"backend": DecodesOnly}),
    "a backend for decodes": Problem(
        {"has_sink": True}, options={"backend": make_composite(TorchBackend, DecodesOnly)}
    ),
}


def compare(problem: Problem, group: RankGroup, limit: float = LIMIT) -> str:
    error = Run(problem, group).largest_error()
    return "" if error <= limit else f"error {error:g}, limit {limit:g}"


def leaving_nan(run: Run) -> Any:
    """A patch: a kernel may leave anything in rows without keys, if it says so by its LSE."""
    forward = run.layer.cached.forward

    def with_nan(*arguments: Any, **more: Any) -> Any:
        out, lse = forward(*arguments, **more)
        return out.masked_fill((lse == -torch.inf).unsqueeze(-1), torch.nan), lse

    return mock.patch.object(run.layer.cached, "forward", with_nan)


def kernels_with_nan(group: RankGroup) -> str:
    run = Run(Problem(), group)
    with leaving_nan(run):
        error = run.largest_error()
    return "" if error <= LIMIT else f"error {error:g}"


def padding(group: RankGroup) -> str:
    """M6, M7: rows past the batch are 0, and a batch may be empty."""
    run = Run(Problem({"has_sink": True}), group)
    run.step(STEPS["prefill"])
    query, key, value = run.tensors(4)
    batch = divided_batch([1, 0, 1, 0], [14, 1, 23, 0], run.tables[1], "cpu")
    output = torch.full((4, run.spec.num_heads, run.spec.head_size_v), torch.nan)
    built = run.builders[1].build(batch)
    run.layer(run.own(query), key, value, run.caches[1], built, output=output)
    empty = run.builders[1].build(divided_batch([0] * 4, [0] * 4, run.tables[1], "cpu"))
    none = run.layer(run.own(query), key, value, run.caches[1], empty)
    good = output[:2].isfinite().all() and not output[2:].any() and not none.any()
    return "" if good else "rows past the batch are not 0"


def captured(group: RankGroup) -> str:
    """X9: a batch of the same sizes is copied into the tensors that a graph reads: other requests,
    whose tensors are new and whose table may be narrower, but not wider."""
    window: dict[str, Any] = {"has_sink": True, "sliding_window": 5}
    short = {**window, "sliding_window": 2}  # which ranks have no visible key changes
    for spec, options in (({}, {}), (window, {}), (short, {"backend": ToyBackend})):
        for query_lens in ([1, 1, 1, 1], [2, 3, 1, 2]):
            run = Run(Problem(spec, options=options), group)
            for name in ("prefill", "mixed", "decode"):
                run.step(STEPS[name])
            lengths = list(zip(query_lens, [15, 11, 24, 18], strict=True))
            for number in range(3):
                lengths = [(new, end + new) for new, end in lengths]
                run.tables[1] = run.tables[1][:, : 8 - bool(number)].contiguous()
                error = error_of(*run.step(lengths, captures=number == 0))
                if not error <= LIMIT:
                    return f"{spec} {query_lens}, replay {number}: error {error:g}"
                lengths = [*lengths[1:], lengths[0]]
                run.tables = [table.roll(-1, 0) for table in run.tables]
            if text := wider_table(run, query_lens, 9 if "sliding_window" not in spec else 0):
                return text
    try:
        run = Run(Problem(), group)
        run.step(STEPS["prefill"], captures=True)
    except ContractError as error:
        return "" if "can be captured" in str(error) else str(error)
    return "a prefill was captured"


def wider_table(run: Run, query_lens: list[int], columns: int) -> str:
    """What is wrong with the refusal of a table of so many columns after a capture; 0 is none."""
    try:
        table = torch.zeros(4, columns, dtype=torch.int32)
        if columns:
            run.builders[1].build(divided_batch(query_lens, query_lens, table, "cpu"))
    except ContractError as error:
        return "" if "was captured with 8" in str(error) else str(error)
    return "a wider table than that of the graph" if columns else ""


def invariance(group: RankGroup) -> str:
    """M15 for a fixed number of ranks: a prompt in one batch, in parts, and among others."""
    spec = {"batch_invariant": True, "sliding_window": 6, "has_sink": True}
    wanted: dict[int, torch.Tensor] = {}
    for cuts in ([22], [9, 12, 22], [1, 2, 3, 22]):
        run = Run(Problem(spec), group)
        query, key, value = run.tensors(22)
        for first, end in zip([0, *cuts], cuts, strict=False):
            other = end % 2 * 3
            lengths = [0, other, end - first, 0], [0, other, end, 0]
            built = run.builders[1].build(divided_batch(*lengths, run.tables[1], "cpu"))
            rows = torch.cat((torch.zeros(other).long(), torch.arange(first, end)))
            inputs = run.own(query)[rows], key[rows], value[rows]
            out = run.layer(*inputs, run.caches[1], built)[other:]
            for row, position in enumerate(range(first, end)):
                if not torch.equal(wanted.setdefault(position, out[row]), out[row]):
                    return f"position {position} has other bits in {first} to {end}"
    return ""


def refusals(group: RankGroup) -> str:
    """X8: what one rank refuses, all refuse, and go on afterwards."""
    last, run = group.rank == group.world_size - 1, Run(Problem(), group)
    query, key, value = run.tensors(36)

    def other_window() -> None:
        spec = run.spec.replace(sliding_window=3 + last)
        ParallelAttention(spec, group, run.division, device="cpu")

    def bad_sinks() -> None:
        spec, sinks = run.spec.replace(has_sink=True), torch.zeros(4 + last)
        ParallelAttention(spec, group, run.division, sinks=sinks, device="cpu")

    def list_of_sinks() -> None:
        spec, sinks = run.spec.replace(has_sink=True), [0.0] * 4 if last else torch.zeros(4)
        ParallelAttention(spec, group, run.division, sinks=sinks, device="cpu")  # type: ignore

    def no_division() -> None:
        given: Any = group.world_size if last else run.division
        ParallelAttention(run.spec, group, given, device="cpu")

    def other_batch() -> None:
        run.builders[1].build(divided_batch([1, 2 + last], [1, 3], run.tables[1][:2], "cpu"))

    def short_table() -> None:
        table = run.tables[1][:1, : 1 if last else 9]
        run.builders[1].build(divided_batch([22], [22], table, "cpu"))

    def no_lengths() -> None:
        missing: Any = None
        batch = divided_batch([1, 2], [1, 3], run.tables[1][:2], "cpu")
        run.builders[1].build(missing if last else batch)

    def broken_builder() -> None:
        batch = divided_batch([1, 2], [1, 3], run.tables[1][:2], "cpu")
        error = mock.patch.object(
            run.builders[1], "_parts", side_effect=AttributeError("no lengths")
        )
        with error if last else nullcontext():
            run.builders[1].build(batch)

    def other_dtype() -> None:
        lengths = [[pair[n] for pair in STEPS["prefill"]] for n in (0, 1)]
        built = run.builders[1].build(divided_batch(*lengths, run.tables[1], "cpu"))
        own = run.own(query)
        run.layer(own.double() if last else own, key, value, run.caches[1], built)

    def no_tensor() -> None:
        lengths = [[pair[n] for pair in STEPS["prefill"]] for n in (0, 1)]
        built = run.builders[1].build(divided_batch(*lengths, run.tables[1], "cpu"))
        given: Any = None if last else run.own(query)
        run.layer(given, key, value, run.caches[1], built)

    def two_scales() -> None:
        case = Run(Problem({**LATENT, "kv_cache_dtype": "fp8"}), group)
        if last:
            case.caches[1].k_scale = 0.5
        case.step([(0, 0), (1, 1), (0, 0), (0, 0)])  # a key of the first rank only

    def call_with(key: torch.Tensor, cache: attnlib.PagedKVCache) -> None:
        lengths = [[pair[n] for pair in STEPS["prefill"]] for n in (0, 1)]
        built = run.builders[1].build(divided_batch(*lengths, run.tables[1], "cpu"))
        run.layer(run.own(query), key, value, cache, built)

    def negated_key() -> None:
        call_with(torch._neg_view(key) if last else key, run.caches[1])

    def shared_tokens() -> None:
        keys, values = run.caches[1].key_cache, run.caches[1].value_cache
        views = keys[:1].expand_as(keys) if last else keys
        call_with(key, attnlib.PagedKVCache.from_views(views, values))

    def without_lse() -> None:
        backend = toy_with(lse=False) if last else None
        ParallelAttention(run.spec, group, run.division, device="cpu", backend=backend)

    def other_rows() -> None:
        backend = ToyBackend if last else None
        ParallelAttention(run.spec, group, run.division, device="cpu", backend=backend)

    expected = {
        without_lse: "returning the LSE: not supported", other_rows: "ranks 0 and",
        list_of_sinks: "sinks is [0.0, 0.0, 0.0, 0.0]; it must be",
        other_window: "ranks 0 and", bad_sinks: "sinks is torch.float32 [5]",
        no_lengths: f"rank {group.world_size - 1} refuses: common_attn_metadata is a NoneType",
        broken_builder: f"rank {group.world_size - 1} refuses: AttributeError: no lengths",
        other_batch: "ranks 0 and", short_table: "has 1 columns", other_dtype: "torch.float64",
        no_tensor: "query is a NoneType; it must be a torch.Tensor",
        two_scales: "k_scale=0.5 and v_scale=1.0",
        negated_key: "key is a view that torch negates", shared_tokens: "tokens share memory",
        no_division: f"division is a int; pass attnlib.parallel.Interleaved({group.world_size})",
    }  # fmt: skip
    if text := not_refused(expected):
        return text
    return "" if run.largest_error() <= LIMIT else "wrong results after refusals"


def not_refused(expected: dict[Callable[[], None], str]) -> str:
    """The first call that all ranks do not refuse with its text; "" for none."""
    for call, text in expected.items():
        try:
            call()
        except ContractError as error:
            if text not in str(error) or "X8" not in str(error):
                return f"{call.__name__}: {error}"
        else:
            return f"{call.__name__} was not refused"
    return ""


def refused_batches(group: RankGroup) -> str:
    """X8: batches that differ in their lengths or have wrong blocks on one rank, and batches and
    tensors that would give a wrong result on all of them. Nothing is written."""
    last, run = group.rank == group.world_size - 1, Run(Problem(), group)
    cache, outside = run.caches[1], run.tables[1].clone()
    outside[0, 0] = 99 if last else 0

    def call(common: Any, layer: Any = run.layer, *, grad: bool = False) -> None:
        built = layer.make_builder().build(common)
        query, key, value = run.tensors(common.num_actual_tokens)
        run.layer(run.own(query).requires_grad_(grad), key, value, cache, built)

    def other_lengths() -> None:
        lengths = [3, 9] if last else [9, 3]
        call(divided_batch([1, 1], lengths, run.tables[1][:2], "cpu"))

    def last_of_many_lengths() -> None:
        lengths = [20] + [9] * 98 + [9 + last]
        call(divided_batch([1] * 100, lengths, run.tables[1][:1].expand(100, -1), "cpu"))

    def block_of_a_decode() -> None:
        call(divided_batch([2], [9], outside[:1], "cpu"))

    def block_of_a_prefill() -> None:
        call(divided_batch([20], [20], outside[:1], "cpu"))

    def no_block() -> None:
        call(divided_batch([20], [20], outside[:1] - (100 if last else 0), "cpu"))

    def other_block_size() -> None:
        call(attnlib.CommonAttentionMetadata.from_lengths([1], [9], [[1, 2]], 2 * BLOCK, "cpu"))

    def batch_of_a_window() -> None:
        spec = run.spec.replace(sliding_window=3)
        windowed = ParallelAttention(spec, group, run.division, device="cpu")
        call(divided_batch([1], [9], run.tables[1][:1], "cpu"), windowed)

    def gradient() -> None:
        call(divided_batch([1], [9], run.tables[1][:1], "cpu"), grad=True)

    def call_into(output: Callable[[torch.Tensor], torch.Tensor]) -> None:
        built = run.builders[1].build(divided_batch([9], [18], run.tables[1][:1], "cpu"))
        query, key, value = run.tensors(9)
        own = run.own(query)
        run.layer(own, key, value, cache, built, output=output(own))

    def strided_output() -> None:
        call_into(lambda own: torch.empty(*own.shape, 2)[..., 0])

    def output_of_the_query() -> None:  # whose heads are sent after the new tokens are attended
        call_into(lambda own: own)

    def output_of_the_cache() -> None:
        call_into(lambda own: cache.key_cache.view(-1)[: own.numel()].view_as(own))

    def other_scale() -> None:
        ParallelAttention(run.spec, group, run.division, device="cpu", scale=1 + last)

    expected = {
        other_lengths: "ranks 0 and", last_of_many_lengths: " 9, 10]",
        block_of_a_decode: "slot_mapping[", block_of_a_prefill: "slot_mapping[",
        no_block: "must not be negative",
        other_block_size: f"block_size={2 * BLOCK}", batch_of_a_window: "was built for",
        gradient: "requires a gradient", other_scale: "ALL_TO_ALL: 'all_to_all'>, 2.0, 'batch'",
        strided_output: "last stride 2", output_of_the_query: "output is query",
        output_of_the_cache: "in the memory of the cache",
    }  # fmt: skip
    with torch.enable_grad():
        if text := not_refused(expected):
            return text
    return "" if bool(cache.key_cache.isnan().all()) else "keys were written"


# --------------------------------------------------------------------------- wrong implementations


def sink_per_rank(group: RankGroup) -> str:
    combine = Exchange.combine

    def wrong(self: Exchange, out: Any, lse: Any, *rest: Any, **more: Any) -> None:
        *others, sinks = rest
        none = torch.full_like(sinks, -torch.inf)
        out, lse = add_sink(out.transpose(0, 1), lse.transpose(0, 1), self.own_heads(sinks))
        combine(self, out.transpose(0, 1).contiguous(), lse.transpose(0, 1), *others, none, **more)

    with mock.patch.object(Exchange, "combine", wrong):
        return compare(PROBLEMS["sinks"], group)


def base_2_lse(group: RankGroup) -> str:
    combine = Exchange.combine

    def wrong(self: Exchange, out: Any, lse: Any, *rest: Any, **more: Any) -> None:
        combine(self, out, lse / math.log(2), *rest, **more)

    with mock.patch.object(Exchange, "combine", wrong):
        return compare(PROBLEMS["grouped heads"], group)


def local_window(group: RankGroup) -> str:
    def wrong(*arguments: Any) -> Any:
        form = local_spec.local_form(*arguments)
        return form._replace(spec=form.spec.replace(window=Window(11, None)))

    with mock.patch("attnlib.parallel.attention.local_form", wrong):
        return compare(PROBLEMS["window of whole periods"], group)


def nan_of_an_empty_rank(group: RankGroup) -> str:
    def wrong(self: Any, parts: Any, output: Any, lse: Any) -> None:
        outs = parts.outs.unflatten(0, (group.world_size, -1))
        weights, merged = exchange.merge_weights(parts.lses.unflatten(0, (group.world_size, -1)))
        if bool((lse == -torch.inf).all()):  # not the new tokens of prefills
            output.copy_((outs * weights.unsqueeze(-1)).sum(0))
            lse.copy_(merged)
            return
        merged_rows(self, parts, output, lse)

    merged_rows = merge.MergeRows.merge
    with mock.patch.object(merge.MergeRows, "merge", wrong):
        return kernels_with_nan(group)


def kernels(spec: dict[str, Any], run: int, group: RankGroup) -> str:
    """Attention and merge by Triton's kernels, in its interpreter."""
    from attnlib.ops.triton.merge_states import merge_partial_rows

    case = Run(Problem(spec, run, options={"backend": "triton"}), group)
    with mock.patch.object(merge, "operation", lambda *_: merge_partial_rows):
        for end in range(1, 5):
            error = error_of(*case.step([(1, end), (0, 0), (0, 0), (1, end)]))
            if not error <= LIMIT:
                return f"length {end}: error {error:g}"
    return ""


KERNELS: dict[str, Callable[[RankGroup], str]] = {
    "kernels: sinks": partial(kernels, {"has_sink": True}, 1),
    "kernels: window, alibi": partial(kernels, {"has_alibi": True, "sliding_window": 3}, 2),
}
WRONG: dict[str, Callable[[RankGroup], str]] = {
    "a sink of each rank": sink_per_rank,
    "an LSE in base 2": base_2_lse,
    "a window of local positions": local_window,
    "NaN of an empty rank": nan_of_an_empty_rank,
}
PROPERTIES: dict[str, Callable[[RankGroup], str]] = {
    "kernels with NaN": kernels_with_nan,
    "padding": padding,
    "captured": captured,
    "invariance": invariance,
    "refusals": refusals,
    "refused batches": refused_batches,
}
CASES: dict[str, Callable[[RankGroup], str]] = {
    **{name: partial(compare, problem) for name, problem in PROBLEMS.items()},
    **PROPERTIES,
    **WRONG,
    **KERNELS,
}
