"""`ParallelAttention`: a layer whose keys are divided among the ranks of a group (X1 to X8).

Every rank has all tokens of the batch, its own query heads, and the KV heads that all ranks share:
tensor parallelism beyond the number of KV heads. Batches of decodes, verifications and prefills
run in the same call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.compile.objects import register
from attnlib.layer.call import new_lse
from attnlib.layer.tensor_checks import check_return_lse
from attnlib.parallel.between import attend_keys
from attnlib.parallel.builder import ParallelBuilder
from attnlib.parallel.checks import ParallelCall, check_parallel_call
from attnlib.parallel.divisions import Division
from attnlib.parallel.group import RankGroup
from attnlib.parallel.layer_parts import choose_parts, make_builders
from attnlib.parallel.local_spec import local_form
from attnlib.parallel.metadata import ParallelMetadata
from attnlib.parallel.operator import attend_opaquely
from attnlib.parallel.setup_checks import (
    check_ranks,
    checked_method,
    checked_per_head,
    checked_setup,
    effective_agreement,
    exchange_of,
    shares_memory,
    spec_facts,
)
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["ParallelAttention"]


class ParallelAttention(nn.Module):
    """One attention layer over divided keys.

    Args:
        spec: of the layer, with the query heads of this rank. All ranks have the same KV heads.
        group: the ranks.
        division: of the positions.
        backend: as in `Attention`, with LSEs. One for decoders only, and each of
            "prefill:A,decode:B", gets the parts that it can compute.
        scale: softmax scale; None means 1/sqrt(head_size).
        alibi_slopes: `[Hq]` float32, of this rank's heads.
        sinks: `[Hq]` of a floating-point dtype, of this rank's heads.
        exchange: a value of `ExchangeMethod`; None chooses (X6).
        agreement: when ranks agree that none of them refuses (X8): with every "call", in the first
            call of a "batch", or "never", where the engine gives all of them the same inputs.
            ATTNLIB_VALIDATE=1 makes "batch" a "call".
        device: of this rank.
        prefix: name of the layer, for messages.

    Attributes:
        exchange: of queries and results.
        form: what `cached` computes.
        cached, context, new: the layers over its keys, over the context of prefills, and over their
            new tokens. Without the last two, every token is a request of `cached`.

    Raises:
        ContractError: on every rank, if an argument of one is wrong or its layer cannot be divided,
            with the reasons of that rank. Without agreements or a group, on this rank.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        group: RankGroup,
        division: Division,
        *,
        backend: str | type[AttentionBackend] | None = None,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        exchange: str | None = None,
        agreement: str = "batch",
        device: torch.device | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        check_ranks(group)
        self.spec, self.group, self.division, self.prefix = spec, group, division, prefix
        self._backend, self.agreement = backend, effective_agreement(agreement)

        def attempt() -> tuple[object, Tensor | None]:
            self._device, self.scale = checked_setup(group, spec, scale, device)
            method = checked_method(spec, group, division, exchange, agreement)
            slopes = checked_per_head("alibi_slopes", alibi_slopes, spec.has_alibi, spec)
            checked_per_head("sinks", sinks, spec.has_sink, spec)
            self._select(spec)
            facts = (*spec_facts(spec), division, method, self.scale, self.agreement, prefix)
            by_memory = shares_memory(spec, exchange, self._device.type)
            return (*facts, f"by_row={self._parts.context is None}, {by_memory=}"), slopes

        slopes = group.agreed(self.agreement, "layer", attempt)
        self.exchange = exchange_of(group, spec, exchange, self._device)
        self._slopes = None if slopes is None else self.exchange.own_heads(slopes.float())
        self.sinks = sinks
        self._make_layers()
        self.handle = register(self)

    def _select(self, spec: AttentionSpec) -> None:
        """Decide what this rank computes, and by which backends."""

        def select(part: AttentionSpec, backend: Any) -> type[AttentionBackend]:
            return get_attn_backend(part, backend, self._device, layer_name=self.prefix)

        form = local_form(spec, self.division, self.group.rank)
        self._parts = choose_parts(spec, form, self._backend, select)
        self.form = self._parts.form

    def _make_layers(self) -> None:
        tensors = None if self._slopes is None else {"slope": self._slopes}
        arguments = {"scale": self.scale, "device": self._device, "prefix": self.prefix}
        self.cached, self.context, self.new = self._parts.make_layers(tensors, arguments)

    def set_block_size(self, block_size: int) -> None:
        """See `Attention.set_block_size`; without an agreement."""
        spec = self.spec.replace(block_size=block_size)
        self._select(spec)
        self.spec = spec
        self._make_layers()

    def make_builder(self, limits: BatchLimits | None = None, **kwargs: Any) -> ParallelBuilder:
        """The builder of batches for layers with this spec.

        Args:
            limits: the largest batch.
            kwargs: further arguments of `AttentionMetadataBuilder`.
        """
        layers, given = (self.cached, self.context, self.new), {"device": self._device, **kwargs}
        return ParallelBuilder(self, *make_builders(*layers, limits, given))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: PagedKVCache,
        metadata: ParallelMetadata,
        return_lse: bool = False,
        *,
        output: Tensor | None = None,
    ) -> Any:
        """Write this rank's share of the new keys, then attend.

        Args:
            query: `[T, Hq, D]` or `[T, Hq * D]` of this rank's heads; rows past the batch give 0.
            key, value: `[T, Hkv, D]` and `[T, Hkv, Dv]` or flat, of all new tokens. None where they
                are in the cache already and the batch has no part over new tokens.
            cache: this rank's keys.
            metadata: of the builder.
            return_lse: also return the LSE.
            output: `[T, Hq, Dv]` or flat; None allocates.

        Returns:
            The output, flat or per head like the query; with `return_lse` a pair with the LSE,
            `[T, Hq]` float32.

        Raises:
            ContractError: a tensor does not fit; on every rank, as `agreement` says (`return_lse`:
                on this one). Nothing is written or sent then.
        """
        check_return_lse(return_lse)
        if torch.compiler.is_compiling():
            out, lse = attend_opaquely(self, query, key, value, cache, metadata, output)
        else:
            out, lse = self.run(query, key, value, cache, metadata, output)
        shown = output
        if shown is None:
            shown = out.flatten(1) if query.dim() == 2 else out
        return (shown, lse) if return_lse else shown

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: PagedKVCache,
        metadata: ParallelMetadata,
        output: Tensor | None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output `[T, Hq, Dv]` and the LSE of a call that is not traced; see `forward`."""
        call = check_parallel_call(self, query, key, value, cache, metadata, output)
        if call.key is not None and call.value is not None and metadata.slot_mapping is not None:
            self.cached.impl.write_kv(call.key, call.value, cache, metadata.slot_mapping)
        tokens, result = metadata.num_actual_tokens, call.output
        if lse is None:
            lse = new_lse(self.spec, call.query)
        if result.shape[0] > tokens:
            result[tokens:].zero_()
            lse[tokens:].fill_(-torch.inf)
        if tokens == 0:
            return result, lse
        own, out, own_lse = call.query[:tokens], result[:tokens], lse[:tokens]
        has_state = self._attend_new(call, cache, metadata, out, own_lse)
        if metadata.cached is not None:
            queries = self.exchange.gather_heads(own)
            by_memory = self.exchange.fits(tokens) and not has_state
            partial, partial_lse, splits = attend_keys(self, queries, cache, metadata, by_memory)
            state = partial, partial_lse, metadata.merge_rows, out, own_lse, self.sinks
            self.exchange.combine(*state, has_state=has_state, splits=splits)
        elif self.sinks is not None:
            self.exchange.add_sinks(out, own_lse, self.sinks)
        return result, lse

    def attend_cached(
        self, queries: Tensor, cache: PagedKVCache, metadata: ParallelMetadata
    ) -> tuple[Tensor, Tensor]:
        """The state of the query heads of all ranks, `[T, world_size * Hq, D]`, over this rank's
        keys: output and LSE, -inf for tokens that see none of them. Nothing is exchanged."""
        layer = self.context if metadata.over_context else self.cached
        assert layer is not None and metadata.cached is not None
        out, lse = layer(queries, None, None, cache, metadata.cached, True)
        if metadata.empty is not None:
            lse[: len(metadata.empty)].masked_fill_(metadata.empty[:, None], -torch.inf)
        return out, lse

    def _attend_new(
        self,
        call: ParallelCall,
        cache: PagedKVCache,
        metadata: ParallelMetadata,
        out: Tensor,
        lse: Tensor,
    ) -> bool:
        """Whether there is a state over the new tokens, where the cached keys are the context only;
        it is computed into `out` and `lse`."""
        if metadata.new is None or self.new is None:
            return False
        tokens = metadata.num_actual_tokens
        assert call.key is not None and call.value is not None  # `check_parallel_call` refuses it
        keys = call.key[:tokens], call.value[:tokens]
        scratch = metadata.scratch.like(cache)
        _, found = self.new(call.query[:tokens], *keys, scratch, metadata.new, True, output=out)
        lse.copy_(found)
        return True
