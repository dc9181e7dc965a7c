"""The layer: `Attention(q, k, v, cache, metadata)` writes the new keys, then attends (P7).

Everything a step needs is an argument. The layer itself keeps what belongs to one layer of one model for good: its spec, its backend and impl, the
scale, slopes and sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from attnlib import env
from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache, Scale
from attnlib.compile.objects import register
from attnlib.compile.operator import attend_opaquely
from attnlib.debug.validation import call_facts, check_call, check_values, per_head
from attnlib.errors import ContractError
from attnlib.selection import get_attn_backend
from attnlib.settled import likeness, meaning_of, remember
from attnlib.spec import AttentionSpec, AttentionType

__all__ = ["OBSERVERS", "Attention"]

OBSERVERS: list[Callable[..., None]] = []
"""Called after every call of a layer with (layer, query, key, value, cache, metadata, output, lse); `attnlib.shadow` stands here."""


class Attention(nn.Module):
    """One attention layer over a paged KV cache.

    Args:
        spec: what the layer needs.
        backend: a name, a backend class, or None for selection by `use_backend`, ATTNLIB_BACKEND and priority.
        scale: softmax scale; None means 1/sqrt(head_size).
        alibi_slopes: one slope per query head, when `spec.has_alibi`.
        sinks: one sink logit per query head (M4), when `spec.has_sink`.
        k_scale, v_scale: scales of a quantised cache (M9); they are handed to the first cache that the layer sees.
        kv_sharing_target_layer_name: the layer whose cache this one reads; it then never writes (P8).
        prefix: the layer's name, for messages and records.
        device: where it will run, for selection; None means a GPU where torch sees one, else the CPU.

    Raises:
        UnknownBackendError, BackendUnavailableError, UnsupportedConfigError: the backend asked for is not known, not here, or refuses the spec.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        backend: str | type[AttentionBackend] | None = None,
        scale: float | None = None,
        alibi_slopes: torch.Tensor | Sequence[float] | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        kv_sharing_target_layer_name: str | None = None,
        prefix: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kv_sharing_target_layer_name is not None and not spec.kv_sharing:
            spec = spec.replace(kv_sharing=True)
        self.spec = spec
        self.backend = get_attn_backend(spec, backend, device, layer_name=prefix)
        if alibi_slopes is not None and not isinstance(alibi_slopes, torch.Tensor):
            alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        self.impl = self.backend.get_impl_cls()(
            spec,
            scale=scale,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            config=self.backend.config,
            prefix=prefix,
        )
        self.k_scale, self.v_scale = k_scale, v_scale
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.prefix = prefix
        self.writes = spec.is_paged and not spec.kv_sharing
        self.meaning = meaning_of(self)
        self._accepted: tuple[Any, ...] = ()  # the facts of the last call that passed `check_call`
        self.handle = register(self)

    @classmethod
    def from_arguments(
        cls,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        cache_config: Any = None,
        quant_config: Any = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        use_mla: bool = False,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER.value,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: type[AttentionBackend] | None = None,
        *,
        dtype: torch.dtype | None = None,
        sinks: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        **spec_fields: Any,
    ) -> Attention:
        """The layer from vLLM's argument list.

        Args:
            cache_config: anything with `block_size` and `cache_dtype`; None means blocks of 16 in the model's dtype.
            quant_config: accepted and not read: scales come by `k_scale` and `v_scale` of the layer or its cache.
            dtype: dtype of q, k, v; None means torch's default dtype.
            sinks, device: as in the class.
            spec_fields: more fields of `AttentionSpec`.
        """
        spec = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            head_size=head_size,
            dtype=dtype or torch.get_default_dtype(),
            kv_cache_dtype=getattr(cache_config, "cache_dtype", "auto"),
            block_size=getattr(cache_config, "block_size", None) or 16,
            attn_type=AttentionType(attn_type),
            sliding_window=per_layer_sliding_window,
            logits_soft_cap=logits_soft_cap or None,
            has_alibi=alibi_slopes is not None,
            has_sink=sinks is not None,
            use_mla=use_mla,
            **spec_fields,
        )
        return cls(
            spec,
            backend=attn_backend,
            scale=scale,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            prefix=prefix,
            device=device,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        return_lse: bool = False,
        *,
        output: torch.Tensor | None = None,
    ) -> Any:
        """Write the new keys and values, then attend.

        Args:
            query: `[T, Hq * D]` or `[T, Hq, D]`, strided (P9); T may exceed the batch's tokens (padding), those rows come back as 0 (M6).
            key: `[T, Hkv * D]` or `[T, Hkv, D]`; None when it is in the cache already (or the layer shares another's, P8).
            value: `[T, Hkv * Dv]` or `[T, Hkv, Dv]`; None with `key`.
            cache: this layer's cache; None for encoders, whose keys are not cached.
            metadata: what the backend's builder made of the batch.
            return_lse: also return the log of the softmax denominator (M5); the spec should say `needs_lse`.
            output: where to write, `[T, Hq, Dv]` or `[T, Hq * Dv]`; None allocates.

        Returns:
            the output, flat or per head as the query came; with `return_lse`, a pair with `[T, Hq]` float32.

        Raises:
            ContractError: a tensor that does not fit the spec, the cache or the batch; nothing is written or launched then.
            LayoutMismatchError: the backend does not read the cache's order in memory; likewise.
        """
        compiling = torch.compiler.is_compiling()
        like = (
            None
            if compiling or return_lse or OBSERVERS
            else likeness(self, query, key, value, cache, metadata, output)
        )
        if like is not None and (known := metadata.settled.get(like)) is not None:
            again, shape = known
            if output is None:
                output = (
                    torch.empty_like(query)
                    if shape is None
                    else torch.empty(shape, dtype=query.dtype, device=query.device)
                )
            if again(self.impl, query, key, value, cache, metadata, output):
                return output
        spec = self.spec
        q = per_head("query", query, spec.num_heads, spec.head_size)
        k = None if key is None else per_head("key", key, spec.num_kv_heads, spec.head_size)
        v = None if value is None else per_head("value", value, spec.num_kv_heads, spec.head_size_v)
        out = self._output_for(query, output)
        heads = out.view(-1, spec.num_heads, spec.head_size_v) if out.dim() == 2 else out
        lse = (
            torch.empty(q.shape[0], spec.num_heads, dtype=torch.float32, device=q.device)
            if return_lse
            else None
        )
        if compiling:
            attend_opaquely(self, q, k, v, cache, metadata, heads, lse)
        else:
            self._serve(q, k, v, cache, metadata, heads, lse)
            remember(self, like, (query, out), q, k, v, cache, metadata, heads)
        return (out, lse) if return_lse else out

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """`forward` on tensors that are all per head, into outputs that exist: check, write the new keys, attend. Never traced.

        Args:
            query, key, value: `[T, Hq, D]`, `[T, Hkv, D]`, `[T, Hkv, Dv]`.
            cache, metadata: as in `forward`.
            output: `[T, Hq, Dv]`, written in place; lse: `[T, Hq]` float32, written in place when given.

        Raises:
            ContractError: as `forward`.
        """
        like = (
            None
            if OBSERVERS or lse is not None
            else likeness(self, query, key, value, cache, metadata, output)
        )
        known = None if like is None else metadata.settled.get(like)
        if known is None or not known[0](self.impl, query, key, value, cache, metadata, output):
            self._serve(query, key, value, cache, metadata, output, lse)
            remember(self, like, (query, output), query, key, value, cache, metadata, output)

    def _serve(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """`attend` for a call that is like none before."""
        facts = call_facts(query, key, value, cache, metadata, lse is not None)
        if facts != self._accepted:
            check_call(self, query, key, value, cache, metadata, lse is not None)
            self._accepted = facts
        if cache is not None:
            self._hand_over_scales(cache)
        level = env.read("ATTNLIB_VALIDATE")
        if level:
            check_values(self, query, cache, metadata)
        if cache is None:
            assert key is not None and value is not None  # check_call has made sure
            self.impl.forward_unpaged(query, key, value, metadata, output, lse)
        else:
            if (
                key is not None
                and value is not None
                and self.writes
                and metadata.slot_mapping is not None
            ):
                self.impl.write_kv(key, value, cache, metadata.slot_mapping)
            self.impl.forward(query, cache, metadata, output, lse)
        if level == 2:
            import_module("attnlib.debug.shadow").watch_for_validation()
        for observer in OBSERVERS:
            observer(self, query, key, value, cache, metadata, output, lse)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.handle = register(self)  # a copy of a layer is another layer
        self.meaning = meaning_of(self)  # counted in each process for itself

    def calc_kv_scales(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Set `k_scale` and `v_scale` so that the largest element of `key` and `value` becomes the largest that the cache's dtype can hold.

        Call it before the layer sees its cache; for a cache that is not quantised it does nothing.
        """
        if not self.spec.is_kv_quantized:
            return
        largest = torch.finfo(self.spec.kv_dtype).max
        self.k_scale = (key.abs().amax().float() / largest).clamp(
            min=torch.finfo(torch.float32).tiny
        )
        self.v_scale = (value.abs().amax().float() / largest).clamp(
            min=torch.finfo(torch.float32).tiny
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """For engines that call it after loading weights: attention has none, so there is nothing to do."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that this layer runs on."""
        return self.backend

    def extra_repr(self) -> str:
        """Sizes, scale and backend, for `print(model)`."""
        spec = self.spec
        return (
            f"{self.prefix + ', ' if self.prefix else ''}num_heads={spec.num_heads}, num_kv_heads={spec.num_kv_heads}, head_size={spec.head_size}, "
            f"scale={self.impl.scale:.6g}, backend={self.backend.get_name()}"
        )

    def _output_for(self, query: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        spec = self.spec
        shape = (
            (query.shape[0], spec.num_heads * spec.head_size_v)
            if query.dim() == 2
            else (query.shape[0], spec.num_heads, spec.head_size_v)
        )
        if output is None:
            if query.shape == shape and query.is_contiguous():
                return torch.empty_like(query)  # the cheaper call
            return torch.empty(shape, dtype=query.dtype, device=query.device)
        if output.shape not in (shape, (query.shape[0], spec.num_heads, spec.head_size_v)):
            raise ContractError(
                f"output has shape {tuple(output.shape)}; it must be {list(shape)}", rule="P9"
            )
        if output.dtype != query.dtype or output.device != query.device or output.stride(-1) != 1:
            raise ContractError(
                f"output is {output.dtype} on {output.device} with last stride {output.stride(-1)}; it must be {query.dtype} on {query.device} "
                f"with last stride 1",
                rule="P9",
            )
        return output

    def _hand_over_scales(self, cache: PagedKVCache) -> None:
        """The layer's scales become its cache's; a cache that already has others belongs to another layer."""
        for name in ("k_scale", "v_scale"):
            mine, its = getattr(self, name), getattr(cache, name)
            if mine is its or (isinstance(mine, float) and mine == 1.0):
                continue
            if isinstance(its, float) and its == 1.0:
                setattr(cache, name, mine)
            elif not _same(mine, its):
                raise ContractError(
                    f"{name} of layer {self.prefix or '(unnamed)'} is {mine}, that of its cache is {its}: they must agree",
                    rule="M9",
                )


def _same(mine: Scale, its: Scale) -> bool:
    if isinstance(mine, float) and isinstance(its, float):
        return mine == its
    return bool(
        torch.equal(
            torch.as_tensor(mine, device="cpu").float(), torch.as_tensor(its, device="cpu").float()
        )
    )
