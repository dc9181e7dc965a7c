"""`ParallelPrefill`: prompts whose tokens are divided among the ranks of a group (X10).

Every rank has the queries, keys and values of its own tokens, for all heads of the layer. Short
prompts are computed over keys gathered from all ranks, long ones by passing the keys around a ring
while the rank attends to those that it has. Context that the ranks hold takes part as it is stored.
Each rank stores its share of the new keys as they pass, by the division of the cache, so that
decodes by `ParallelAttention` can follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.compile.objects import register
from attnlib.errors import UnsupportedConfigError
from attnlib.layer import Attention
from attnlib.layer.call import new_lse
from attnlib.layer.tensor_checks import check_return_lse
from attnlib.ops.dispatch import operation
from attnlib.parallel.divisions import Division
from attnlib.parallel.group import RankGroup
from attnlib.parallel.layer_parts import Part, phases
from attnlib.parallel.operator import attend_opaquely
from attnlib.parallel.prefill_builder import PrefillBuilder
from attnlib.parallel.prefill_call import PrefillCall
from attnlib.parallel.prefill_checks import (
    check_prefill,
    check_prefill_call,
    keeps_order,
)
from attnlib.parallel.prefill_metadata import PrefillMetadata
from attnlib.parallel.setup_checks import (
    check_ranks,
    checked_per_head,
    checked_setup,
    effective_agreement,
    spec_facts,
)
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec, AttentionType, MaskKind

__all__ = ["GATHER_BYTES", "ParallelPrefill"]

GATHER_BYTES = 256 << 20
"""Keys and values of a layer up to this size are gathered: a rank then holds those of all ranks.
128k tokens with 4 KV heads of 128 have this size; on four H200s their prefill takes 55.1 ms with
gathered keys and 57.3 ms with a ring."""


class ParallelPrefill(nn.Module):
    """The prefill of one attention layer with divided tokens.

    Args:
        spec: of the layer, with all query heads that this rank computes.
        group: the ranks.
        division: of the positions in the cache, as in `ParallelAttention`.
        backend, scale, alibi_slopes, sinks, device, prefix: as in `Attention`; of a pair
            "prefill:A,decode:B", A is used.
        method: "ring" or "all_gather"; None takes the ring from `GATHER_BYTES` on, if the backend
            can attend to the keys of another sequence.
        agreement: as in `ParallelAttention`.

    Attributes:
        causal, cross: the layers over keys that end with the queries, and over others.

    Raises:
        ContractError: as `ParallelAttention`.
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
        method: str | None = None,
        agreement: str = "batch",
        device: torch.device | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        check_ranks(group)
        self.spec, self.group, self.division, self.method = spec, group, division, method
        self.agreement, self.prefix = effective_agreement(agreement), prefix

        def attempt() -> tuple[object, tuple[Part, Part | None]]:
            self._device, factor = checked_setup(group, spec, scale, device)
            self._rings = keeps_order(spec) and method != "all_gather"
            check_prefill(spec, group, division, method, agreement)
            checked_per_head("alibi_slopes", alibi_slopes, spec.has_alibi, spec)
            checked_per_head("sinks", sinks, spec.has_sink, spec)
            parts = self._select(phases(backend)[0])
            facts = (*spec_facts(spec), division, method, factor, self.agreement, prefix)
            return (*facts, f"rings={self._rings}"), parts

        causal, cross = group.agreed(self.agreement, "prefill layer", attempt)
        given: dict[str, Any] = {"scale": scale, "device": self._device, "prefix": prefix}
        own: dict[str, Any] = {"alibi_slopes": alibi_slopes, "sinks": sinks}
        self.causal = Attention(causal.spec, backend=causal.backend, **given, **own)
        self.cross: Attention | None = None
        if cross is not None:
            self.cross = Attention(cross.spec, backend=cross.backend, **given)
        self.handle = register(self)

    def _select(self, backend: Any) -> tuple[Part, Part | None]:
        """Choose backends for keys that end with the queries, and for others, where no sink counts.
        A backend that cannot serve these does without a ring."""
        causal = self.spec.replace(kv_sharing=False, needs_lse=True)
        cross = causal.replace(
            has_sink=False,
            attn_type=AttentionType.ENCODER_DECODER,
            mask_kind=MaskKind.BIDIRECTIONAL,
        )
        chosen = get_attn_backend(causal, backend, self._device, layer_name=self.prefix)
        second = None
        if self._rings:
            try:
                second = Part(cross, get_attn_backend(cross, backend, self._device))
            except UnsupportedConfigError:
                if self.method == "ring":
                    raise
        self._rings = second is not None
        return Part(causal, chosen), second

    def uses_ring(self, num_tokens: int, num_context: int) -> bool:
        """Whether keys are passed around.

        Args:
            num_tokens: new tokens of the rank with most of them.
            num_context: tokens of context that the rank with most of them sends.
        """
        if not self._rings or self.method is not None:
            return self._rings
        spec = self.spec
        size_v = 0 if spec.use_mla else spec.head_size_v
        per_token = spec.num_kv_heads * (spec.head_size + size_v) * spec.dtype.itemsize
        of_rank = num_tokens * per_token + num_context * spec.kv_bytes_per_token
        return bool(self.group.world_size * of_rank > GATHER_BYTES)

    def make_builder(self, **kwargs: Any) -> PrefillBuilder:
        """The builder of batches; arguments of `AttentionMetadataBuilder`."""
        causal, *cross = (
            layer.backend.make_builder(layer.spec, self._device, **kwargs)
            for layer in (self.causal, self.cross)
            if layer is not None
        )
        return PrefillBuilder(self, causal, cross[0] if cross else None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: PagedKVCache,
        metadata: PrefillMetadata,
        return_lse: bool = False,
    ) -> Any:
        """Exchange the keys, write this rank's share, and attend.

        Args:
            query: `[T, Hq, D]` or flat, of this rank's tokens (`metadata.token_rows`).
            key, value: `[T, Hkv, D]` and `[T, Hkv, Dv]` or flat, likewise.
            cache: this rank's keys.
            metadata: of the builder.
            return_lse: also return the LSE.

        Returns:
            The output, flat or per head like the query; with `return_lse` a pair with the LSE,
            `[T, Hq]` float32.

        Raises:
            ContractError: as `ParallelAttention.forward`. Nothing is written or sent then.
        """
        check_return_lse(return_lse)
        arguments = (query, key, value, cache, metadata)
        if torch.compiler.is_compiling():
            out, lse = attend_opaquely(self, *arguments, None)
        else:
            out, lse = self.run(*arguments)
        out = out.flatten(1) if query.dim() == 2 else out
        return (out, lse) if return_lse else out

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: PagedKVCache,
        metadata: PrefillMetadata,
        output: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output `[T, Hq, Dv]` and the LSE of a call that is not traced; see `forward`."""
        call = check_prefill_call(self, query, key, value, cache, metadata, output)
        lse = new_lse(self.spec, call.query) if lse is None else lse
        lse.fill_(-torch.inf)
        if metadata.is_ring:
            self._ring(call, lse)
        else:
            self._gathered(call, lse)
        return call.output, lse

    def first_state(self, output: Tensor) -> Tensor:
        """The state to which the steps of a ring are added, in float32 or wider."""
        wide = torch.float64 if self.spec.dtype == torch.float64 else torch.float32
        return torch.zeros_like(output, dtype=wide)

    def _gathered(self, call: PrefillCall, lse: Tensor) -> None:
        metadata, (step,) = call.metadata, call.metadata.steps
        keys = [self.group.all_gather(part).flatten(0, 1) for part in call.sent_rows()]
        scratch = call.store(self.causal, keys, step, metadata.cache_slots.flatten())
        if step.metadata is not None:
            arguments = (call.query, None, None, scratch, step.metadata, True)
            lse.copy_(self.causal(*arguments, output=call.output)[1])

    def _ring(self, call: PrefillCall, lse: Tensor) -> None:
        metadata, group = call.metadata, self.group
        state = self.first_state(call.output), lse
        merge = operation("merge_states", "merge_states", call.output)
        keys = call.sent_rows()
        for number, step in enumerate(metadata.steps):
            following = [torch.empty_like(part) for part in keys]
            last = number == group.world_size - 1
            requests = [] if last else group.start_shift(following, keys)
            owner = (group.rank - number) % group.world_size
            scratch = call.store(self.causal, keys, step, metadata.cache_slots[owner])
            layer = self.causal if step.is_causal else self.cross
            if step.metadata is not None and layer is not None:
                part = layer(call.query, None, None, scratch, step.metadata, True)
                merge(*state, *part, *state)
            for request in requests:
                request.wait()
            keys = following
        call.output.copy_(state[0])
