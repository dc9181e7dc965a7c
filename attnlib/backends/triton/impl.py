"""Per-layer attention of the `triton` backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.backends.step_plan import forward_signature
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.backends.triton.plan import make_plan
from attnlib.backends.triton.rotating_plan import make_rotating_plan
from attnlib.backends.triton.spec_shape import layer_shape
from attnlib.backends.triton.uncombined import forward_uncombined
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.compressed import CompressedKeys
from attnlib.ops.rotary import HeadNorm
from attnlib.ops.triton.cache_write import write_kv
from attnlib.ops.triton.hadamard import rotate_heads
from attnlib.ops.triton.hopper.sizes import hopper_reads
from attnlib.ops.triton.varlen_prefill import varlen_prefill
from attnlib.sparse.key_selection import SelectedKeys

__all__ = ["TritonImpl"]


class TritonImpl(AttentionImpl):
    """Attention by attnlib's own kernels. On Hopper, Gluon kernels serve the calls that they
    support and are faster at. `config={"kernels": "portable"}` uses the plain Triton kernels only,
    "hopper" uses the Gluon kernels wherever they support the call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kernels = str(self.config.get("kernels", "auto"))
        shape = layer_shape(self.spec)
        if not hopper_reads(shape.page_format, shape.value_format):
            self._kernels = "portable"  # the only ones that read these pages

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionImpl.write_kv`; by Triton also under the interpreter."""
        pages, scales = (cache.key_cache, cache.value_cache), (cache.k_scale, cache.v_scale)
        if self.spec.has_open_format:
            super().write_kv(key, value, cache, slot_mapping)
            return
        named: dict[str, Any] = {"k_scale": scales[0], "v_scale": scales[1]}
        write_kv(key, value, *pages, slot_mapping, rotation=self.write_rotation, **named)

    @property
    def rotates_writes(self) -> bool:
        """See `AttentionImpl.rotates_writes`: pages with scales, by the kernel that quantizes."""
        return self.spec.scales_in_page and not self.spec.has_open_format

    def rotate_heads(
        self,
        heads: torch.Tensor,
        seed: int = 0,
        *,
        inverse: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.rotate_heads`; by Triton also under the interpreter."""
        return rotate_heads(heads, seed, inverse=inverse, out=out)

    def rotate_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        *,
        interleaved: bool = False,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
    ) -> torch.Tensor:
        """See `AttentionImpl.rotate_and_write_kv`; one launch, or three for open formats."""
        from attnlib.ops.triton import rotary_write  # layers of most engines do not import it

        if self.spec.has_open_format:
            norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm}
            rows = (query, key, value, cache, slot_mapping, cos, sin)
            return super().rotate_and_write_kv(*rows, interleaved=interleaved, **norms)
        if key is None or value is None or slot_mapping is None:
            return rotary_write.rotate(query, cos, sin, interleaved=interleaved, norm=q_norm)
        return rotary_write.rotate_and_write(
            query,
            key,
            value,
            cache.key_cache,
            cache.value_cache,
            slot_mapping,
            cos,
            sin,
            interleaved=interleaved,
            q_norm=q_norm,
            k_norm=k_norm,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            rotation=self.write_rotation,
        )

    def plan_rotary_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        *,
        interleaved: bool = False,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
    ) -> Callable[..., torch.Tensor] | None:
        """See `AttentionImpl.plan_rotary_write`."""
        from attnlib.ops.triton import rotary_write

        if self.spec.has_open_format:
            return None

        def written(key: Any, value: Any, cache: PagedKVCache) -> Any:
            if key is None or value is None or slot_mapping is None:
                return None
            return key, value, cache.key_cache, cache.value_cache, slot_mapping

        write, scales = written(key, value, cache), (cache.k_scale, cache.v_scale)
        kind = (cos, sin, interleaved, q_norm, k_norm)
        rotation = self.write_rotation
        bound = rotary_write.bind_rotation(query, write, *kind, scales, rotation=rotation)

        def run(
            query: torch.Tensor,
            key: Any,
            value: Any,
            cache: PagedKVCache,
            cos: Any,
            sin: Any,
            q_norm: HeadNorm | None,
            k_norm: HeadNorm | None,
        ) -> torch.Tensor:
            write, scales = written(key, value, cache), (cache.k_scale, cache.v_scale)
            return bound.run(query, write, cos, sin, q_norm, k_norm, scales)

        return run

    plan = make_plan
    rotating_plan = make_rotating_plan
    forward_uncombined = forward_uncombined

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: TritonMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`. A layer runs the plan of its batch instead."""
        if query.shape[0] == 0:
            return
        signature = forward_signature(self, query, cache, output, lse)
        plan: Any = metadata.plans.get(signature)
        if plan is None:
            plan = self.plan(signature, query, None, None, cache, metadata, output, lse)
            metadata.plans[signature] = plan
        plan.run(self, query, None, None, cache, output, lse)

    def forward_selected(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: TritonMetadata,
        selected_keys: SelectedKeys,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_selected`."""
        slopes, sinks = self.per_head_tensors
        assert self.spec.key_selection is not None and metadata.block_table is not None
        # Other layers do not import these kernels.
        from attnlib.ops.triton.selected_attention import selected_attention

        selected_attention(
            query,
            cache.key_cache,
            cache.value_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            replace(self.attention_params(metadata, cache), alibi_slopes=slopes, sinks=sinks),
            self.spec.key_selection,
            selected_keys,
            out=output,
            lse=lse,
            kernels=self._kernels,
        )

    def forward_compressed(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: TritonMetadata,
        compressed_keys: CompressedKeys,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_compressed`."""
        from attnlib.backends.triton.two_streams import attend_two_streams

        attend_two_streams(
            self, query, cache, metadata, compressed_keys, output, lse, self._kernels
        )

    def forward_unpaged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: TritonMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_unpaged`."""
        slopes, sinks = self.per_head_tensors
        varlen_prefill(
            query,
            key,
            value,
            metadata.query_start_loc,
            metadata.query_start_loc,
            replace(self.attention_params(metadata), alibi_slopes=slopes, sinks=sinks),
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_query_len,
            out=output,
            lse=lse,
            batch_invariant=self.spec.batch_invariant,
            kernels=self._kernels,
        )
