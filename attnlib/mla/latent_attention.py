"""Multi-head latent attention (M12): the projections around a layer over a latent cache.

The cache holds one latent per token instead of keys and values of every head. Attention over it has
two equal forms. *Absorbed*: queries are projected into the space of the latent, attend to latents,
and the output is projected back. It reads little memory, so it serves decodes, verification steps
and short prefills. *Expanded*: keys and values of every head are computed from the latents. It
needs a third of the operations per query and key, so it serves long prefills. Context that is
already in the cache is expanded in chunks of bounded size, and the results are merged by their LSE.

The forms are those of DeepSeek-V2 (arXiv:2405.04434); chunked context follows vLLM.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.layer import Attention
from attnlib.layer.checks import refuse_gradients
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.paged import PagedMetadata
from attnlib.mla.checks import check_sizes, check_tensors
from attnlib.mla.expanded import attend_expanded
from attnlib.ops.autocast import without_autocast
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec, MaskKind

__all__ = ["LatentAttention"]

EXPAND_FROM = 256
"""New tokens from which a prefill is expanded. With DeepSeek's sizes, the absorbed form costs
2 * (576 + 512) operations per query, key and head, and the expanded form 2 * (192 + 128) and
2 * 512 * 256 per key and head: equal at 171 query tokens."""

_CONTEXT_TOKENS = 16384
"""Latents of the context that are expanded at a time; with 128 heads of 192 and 128, 1.2 GiB in 16
bits."""


class LatentAttention(nn.Module):
    """Attention of one layer with a latent cache, in the form that costs less.

    Args:
        spec: of the latent layer: `use_mla`, `head_size` of latent and rotary part, `head_size_v`
            of the latent.
        projection: `[Hq, P + V, R]`, weights that compute the keys without rotary part (the first P
            rows of a head) and the values (V rows) from a latent of R elements; `kv_b_proj` of
            DeepSeek. Kept without a copy.
        key_size: P.
        scale: softmax scale of heads of P elements and the rotary part; None means
            1/sqrt(P + rotary part).
        backend: as in `Attention`.
        sinks: `[Hq]` float32, with `spec.has_sink`.
        expand_from: new tokens of the longest request from which the prefills of a batch are
            expanded; None never expands.
        context_tokens: latents of the context that are expanded at a time.
        device: of the layer.
        prefix: name of the layer.

    Attributes:
        layer: the `Attention` over latents.
        projection: the weights.

    Raises:
        ContractError: sizes that do not agree.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        projection: Tensor,
        key_size: int,
        *,
        scale: float | None = None,
        backend: str | type[AttentionBackend] | None = None,
        sinks: Tensor | None = None,
        expand_from: int | None = EXPAND_FROM,
        context_tokens: int = _CONTEXT_TOKENS,
        device: torch.device | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        check_sizes(spec, projection, key_size, context_tokens)
        rotary = spec.head_size - spec.head_size_v
        self.layer = Attention(
            spec,
            backend=backend,
            scale=(key_size + rotary) ** -0.5 if scale is None else scale,
            sinks=sinks,
            device=device,
            prefix=prefix,
        )
        self.key_size, self.head_size_v = key_size, projection.shape[1] - key_size
        self.expand_from, self.context_tokens = expand_from, context_tokens
        self.projection = projection

    @property
    def spec(self) -> AttentionSpec:
        """The spec of the latent layer."""
        return self.layer.spec

    @without_autocast
    def forward(
        self,
        query: Tensor,
        latent: Tensor,
        cache: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        output: Tensor | None = None,
        selected_keys: SelectedKeys | None = None,
    ) -> Tensor:
        """Write the latents of the new tokens and attend. A batch without slots has its new latents
        in the cache already; nothing is written then.

        Args:
            query: `[T, Hq, P + rotary part]` in the dtype of the spec, before absorption.
            latent: `[T, R + rotary part]` in that dtype: normalized latents and the rotary part of
                the keys.
            cache: of the layer.
            metadata: of a builder for `spec`.
            output: `[T, Hq, V]` in the dtype of the query, written and returned; the last stride is
                1. None allocates it.
            selected_keys: as in `Attention.forward` (M11); such layers run in the absorbed form.

        Returns:
            `[T, Hq, V]`.

        Raises:
            ContractError: as `Attention.forward`.
        """
        sizes = (self.key_size, self.head_size_v)
        check_tensors(self.spec, sizes, query, latent, cache, output)
        refuse_gradients(query, latent, self.projection)
        selects = self.spec.key_selection is not None or selected_keys is not None
        prefills = None if selects else self._expanded_part(metadata, cache)
        if prefills is None:
            return self._absorbed(query, latent, cache, metadata, output, selected_keys)
        decodes, split = metadata.decode_metadata, metadata.num_decode_tokens
        out, tokens = output, query.shape[0]
        if out is None:
            out = query.new_empty(tokens, query.shape[1], self.head_size_v)
        if decodes is not None:
            rows = slice(None, split)
            self._absorbed(query[rows], latent[rows], cache, decodes, out[rows])
        end = split + prefills.num_actual_tokens
        new = slice(split, end)
        if end < tokens:
            out[end:] = 0.0
        attend_expanded(self, query[new], latent[new], cache, prefills, out[new])
        return out

    def _absorbed(
        self,
        query: Tensor,
        latent: Tensor,
        cache: PagedKVCache,
        metadata: AttentionMetadata,
        output: Tensor | None = None,
        selected_keys: SelectedKeys | None = None,
    ) -> Tensor:
        size, absorbed = self.spec.head_size_v, self.absorb(query)
        key: Tensor | None = latent[:, None]
        value: Tensor | None = latent[:, None, :size]
        if metadata.slot_mapping is None:
            key = value = None
        out = self.layer(absorbed, key, value, cache, metadata, selected_keys=selected_keys)
        return self.project(out, output)

    def absorb(self, query: Tensor) -> Tensor:
        """Queries `[T, Hq, P + rotary part]` in the space of the latents, `[T, Hq, D]` (M12)."""
        heads, to_latent = query.transpose(0, 1), self.projection[:, : self.key_size]
        in_latent = torch.bmm(heads[..., : self.key_size], to_latent).transpose(0, 1)
        return torch.cat((in_latent, query[..., self.key_size :]), dim=-1)

    def project(self, out: Tensor, output: Tensor | None = None) -> Tensor:
        """Values `[T, Hq, V]` of attention over latents `[T, Hq, R]`, written to `output` where it
        is given."""
        heads, to_value = out.transpose(0, 1), self.projection[:, self.key_size :].transpose(1, 2)
        if output is None:
            return torch.bmm(heads, to_value).transpose(0, 1)
        torch.bmm(heads, to_value, out=output.transpose(0, 1))
        return output

    def _expanded_part(
        self, metadata: AttentionMetadata, cache: PagedKVCache
    ) -> PagedMetadata | None:
        """The prefills of the batch, if they run in the expanded form."""
        spec = self.spec
        if (
            self.expand_from is None
            or not isinstance(metadata, PagedMetadata)
            or metadata.num_prefills == 0
            or metadata.max_query_len < self.expand_from
            or metadata.seq_lens_cpu is None
            or metadata.query_start_loc_cpu is None
            or cache.dtype != spec.dtype
            or not _keeps_rows_apart(spec)
            or (cache.key_cache.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return None
        return metadata.prefill_metadata


def _keeps_rows_apart(spec: AttentionSpec) -> bool:
    """Whether attention to all keys is that to new tokens and to context, merged: no window, chunk
    or bias relates a query to positions in both."""
    return (
        spec.mask_kind is MaskKind.CAUSAL
        and spec.visible_window.left is None
        and spec.attention_chunk_size is None
        and spec.score_function is None
        and spec.key_selection is None
        and not (spec.has_alibi or spec.batch_invariant or spec.needs_lse or spec.kv_sharing)
    )
