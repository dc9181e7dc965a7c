"""The layer: `Attention(q, k, v, cache, metadata)` writes the new keys, then attends (P7).

Everything a step needs is an argument. The layer keeps what belongs to one layer of one model: its
spec, backend and impl, scales, slopes and sinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from attnlib.backends.base import (
    AttentionBackend,
    score_attribute,
)
from attnlib.cache.storage import UNIT_SCALE, PagedKVCache, Scale
from attnlib.compile.objects import register
from attnlib.instrumentation import OBSERVERS
from attnlib.layer.checks import (
    per_head,
)
from attnlib.layer.metadata_checks import ExtraKeys, extra_keys
from attnlib.layer.operator import attend_opaquely
from attnlib.layer.plans import PlannedLayer
from attnlib.layer.rotary import rotate_and_write_kv
from attnlib.layer.scales import checked_layer_scale
from attnlib.metadata.compressed import CompressedKeys
from attnlib.ops.rotary import HeadNorm
from attnlib.ops.scales import scale_for
from attnlib.selection import get_attn_backend
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec, AttentionType

__all__ = ["Attention"]


class Attention(PlannedLayer):
    """One attention layer over a paged KV cache.

    Args:
        spec: what the layer needs.
        backend: a name, a backend class, or None for selection by `use_backend`, ATTNLIB_BACKEND
            and priority.
        scale: softmax scale; None means 1/sqrt(head_size).
        alibi_slopes: one slope per query head, when `spec.has_alibi`.
        sinks: one sink logit per query head (M4), when `spec.has_sink`.
        score_tensors: the layer tensors of `spec.score_function` by name (M10). They become buffers
            (parameters stay parameters) with the prefix `score_`.
        k_scale, v_scale: scales of a quantized cache (M9), finite and positive. They become the
            scales of the layer's cache at the first call; 1 uses the scales of the cache.
        kv_sharing_target_layer_name: the layer whose cache this one reads; this layer does not
            write then (P8).
        prefix: the layer's name, for messages and records.
        device: where the layer will run, for selection; None means a GPU if torch sees one, else
            the CPU.

    Raises:
        UnknownBackendError: no backend of this name is registered.
        BackendUnavailableError: the backend cannot run on this machine.
        UnsupportedConfigError: the backend does not support the spec.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        backend: str | type[AttentionBackend] | None = None,
        scale: float | None = None,
        alibi_slopes: torch.Tensor | Sequence[float] | None = None,
        sinks: torch.Tensor | None = None,
        score_tensors: Mapping[str, torch.Tensor] | None = None,
        k_scale: Scale = UNIT_SCALE,
        v_scale: Scale = UNIT_SCALE,
        kv_sharing_target_layer_name: str | None = None,
        prefix: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kv_sharing_target_layer_name is not None and not spec.kv_sharing:
            spec = spec.replace(kv_sharing=True)
        self.spec = spec
        self.backend = get_attn_backend(spec, backend, device, layer_name=prefix)
        self._device = device
        if alibi_slopes is not None and not isinstance(alibi_slopes, torch.Tensor):
            alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        extra = {} if spec.score_function is None else {"score_tensors": score_tensors}
        self.impl = self.backend.get_impl_cls()(
            spec,
            scale=scale,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            config=self.backend.config,
            prefix=prefix,
            **extra,
        )
        self._own_per_head_tensors()
        self.k_scale = checked_layer_scale("k_scale", k_scale, spec)
        self.v_scale = checked_layer_scale("v_scale", v_scale, spec)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.prefix = prefix
        self.writes = spec.is_paged and not spec.kv_sharing
        self._accepted: tuple[Any, ...] = ()  # the last call that passed `check_call`
        self._tensor_check: tuple[Any, Any] = ((), None)  # of the last signature remembered
        self.handle = register(self)

    def _own_per_head_tensors(self) -> None:
        """Register slopes, sinks and score tensors: parameters as parameters, other tensors as
        buffers. The impl reads them from here, so that loaded weights, `.to()` and assignments
        reach every call."""
        slopes, sinks = self.impl.per_head_tensors
        function = self.spec.score_function
        names = () if function is None else map(score_attribute, function.layer_tensors)
        scores = dict(zip(names, self.impl.layer_score_tensors, strict=True))
        self._has_per_head = slopes is not None or sinks is not None or bool(scores)
        for name, tensor in {"alibi_slopes": slopes, "sinks": sinks, **scores}.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.impl.read_per_head_tensors_from(self)

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
        score_tensors: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | str | None = None,
        **spec_fields: Any,
    ) -> Attention:
        """The layer from vLLM's argument list.

        Args:
            cache_config: an object with `block_size` and `cache_dtype`; None means blocks of 16
                in the model's dtype.
            quant_config: not read. Scales are `k_scale` and `v_scale` of the layer or its cache.
            dtype: dtype of q, k, v; None means torch's default dtype.
            sinks, score_tensors, device: as in the class.
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
            score_tensors=score_tensors,
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
        selected_keys: SelectedKeys | None = None,
        compressed_keys: CompressedKeys | None = None,
    ) -> Any:
        """Write the new keys and values to the cache, then attend.

        Args:
            query: `[T, Hq * D]` or `[T, Hq, D]`, strided (P9). T may exceed the batch's tokens
                (padding); the output of those rows is 0 (M6).
            key: `[T, Hkv * D]` or `[T, Hkv, D]`; None when it is in the cache already, or the layer
                shares another layer's cache (P8).
            value: `[T, Hkv * Dv]` or `[T, Hkv, Dv]`; None with `key`.
            cache: this layer's cache; None for encoders, whose keys are not cached.
            metadata: the batch's metadata, from the builder of the layer's backend.
            return_lse: also return the log of the softmax denominator (M5); the spec should declare
                `needs_lse`.
            output: where to write, `[T, Hq, Dv]` or `[T, Hq * Dv]`; None allocates.
            selected_keys: the lists of keys that the queries attend to (M11), exactly when the spec
                has a `key_selection`.
            compressed_keys: the entries of the second key stream (M17), exactly when the spec has
                `compressed_entries`. Not under torch.compile.

        Returns:
            The output, flat or per head like the query; with `return_lse` a pair with the LSE,
            `[T, Hq]` float32.

        Raises:
            ContractError: a tensor does not fit the spec, the cache or the batch. Nothing is
                written or launched then.
            LayoutMismatchError: the backend does not read the cache's memory layout; likewise.
        """
        given: ExtraKeys | None = selected_keys
        if compressed_keys is not None:
            given = extra_keys(selected_keys, compressed_keys)
        if torch.compiler.is_compiling():
            return self._forward_traced(
                query, key, value, cache, metadata, return_lse, output, selected_keys
            )
        plan, shape = self._find_plan(query, key, value, cache, metadata, output, return_lse, given)
        if output is None:
            output = _new_output(query, shape)
        lse = None
        if return_lse:
            rows = (query.shape[0], self.spec.num_heads)
            lse = torch.empty(rows, dtype=torch.float32, device=query.device)
        if given is None:
            plan.run(self.impl, query, key, value, cache, output, lse)
        else:
            _run_with(plan, self.impl, query, key, value, cache, output, lse, given)
        if OBSERVERS:
            self._notify(query, key, value, cache, metadata, output, lse)
        return (output, lse) if return_lse else output

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        return_lse: bool = False,
        *,
        output: torch.Tensor | None = None,
        selected_keys: SelectedKeys | None = None,
        compressed_keys: CompressedKeys | None = None,
    ) -> Any:
        """See `forward`. A call like the one before runs its plan at once, without the dispatch of
        `nn.Module`, which takes longer than the comparison; with hooks it does not."""
        if not torch.compiler.is_dynamo_compiling() and (
            (recent := getattr(metadata, "recent_plan", None)) is not None
            and cache is not None
            and selected_keys is None
            and compressed_keys is None
            and not (
                self._forward_hooks
                or self._forward_pre_hooks
                or _global_forward_hooks
                or _global_forward_pre_hooks
            )
        ):
            group, cache_signature, with_lse, allocates, check, per_head, shape, run, call = recent
            impl, k_scale = self.impl, self.k_scale
            if (
                group is impl._group
                and cache_signature is cache._signature
                and with_lse is return_lse
                and allocates is (output is None)
                and (
                    (k_scale is UNIT_SCALE and self.v_scale is UNIT_SCALE)
                    or (k_scale is cache.k_scale and self.v_scale is cache.v_scale)
                )
                and isinstance(query, torch.Tensor)
            ):
                out, lse = _new_output(query, shape) if output is None else output, None
                if with_lse:
                    rows = (query.shape[0], self.spec.num_heads)
                    lse = torch.empty(rows, dtype=torch.float32, device=query.device)
                done = call is not None and call(
                    query, cache.key_cache, cache.value_cache, out, lse, key, value,
                    *(() if per_head is None else self._own_tensors()),
                )  # fmt: skip
                if (
                    not done
                    and check is not None
                    and (per_head is None or per_head == self._per_head_signature())
                ):
                    done = check(query, key, value, *(() if allocates else (output,)))
                    if done:
                        run(impl, query, key, value, cache, out, lse)
                if done:
                    if OBSERVERS:
                        self._notify(query, key, value, cache, metadata, out, lse)
                    return (out, lse) if with_lse else out
        if selected_keys is None and compressed_keys is None:
            return super().__call__(query, key, value, cache, metadata, return_lse, output=output)
        both = {"selected_keys": selected_keys, "compressed_keys": compressed_keys}
        given = {name: keys for name, keys in both.items() if keys is not None}
        return super().__call__(
            query, key, value, cache, metadata, return_lse, output=output, **given
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls) and "__call__" not in vars(cls):
            cls.__call__ = nn.Module.__call__  # type: ignore[method-assign]  # reaches its forward

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
        selected_keys: SelectedKeys | None = None,
    ) -> None:
        """`forward` on per-head tensors into existing outputs. Never traced by torch.compile.

        Args:
            query, key, value: `[T, Hq, D]`, `[T, Hkv, D]`, `[T, Hkv, Dv]`.
            cache, metadata: as in `forward`.
            output: `[T, Hq, Dv]`, written in place.
            lse: contiguous `[T, Hq]` float32, written in place when given.
            selected_keys: as in `forward`.

        Raises:
            ContractError, LayoutMismatchError: as `forward`.
        """
        plan, _ = self._find_plan(
            query, key, value, cache, metadata, output, lse is not None, selected_keys
        )
        if selected_keys is None:
            plan.run(self.impl, query, key, value, cache, output, lse)
        else:
            _run_with(plan, self.impl, query, key, value, cache, output, lse, selected_keys)
        if OBSERVERS:
            self._notify(query, key, value, cache, metadata, output, lse)

    def rotate_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        *,
        interleaved: bool = False,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, and write keys and values to the cache (P11): one
        launch where the backend declares `rotary_write`. Attend afterwards without keys:

            q = layer.rotate_and_write_kv(q, k, v, cache, metadata, cos, sin)
            out = layer(q, None, None, cache, metadata)

        Args:
            query: `[T, Hq * D]` or `[T, Hq, D]` before normalization and rotation, strided.
            key: `[T, Hkv * D]` or `[T, Hkv, D]`, likewise. None rotates the queries only; so does a
                layer that shares the cache of another one (P8).
            value: `[T, Hkv * Dv]` or `[T, Hkv, Dv]`; None with `key`.
            cache, metadata: as in `forward`.
            cos, sin: `[T, half]`, the angles of each token, in the dtype of the query or float32.
                The first 2 * half elements of a head rotate. None for both skips the rotation.
            interleaved: rotate elements (0, 1), (2, 3), ... of a head; else (0, half), (1, half +
                1), ...
            q_norm, k_norm: RMSNorm of each query and key head before the rotation, or None.

        Returns:
            The rotated queries, flat or per head like `query`.

        Raises:
            ContractError: a tensor does not fit the spec, the cache or the batch, or the layer has
                no keys to rotate: latents (P10) or no paged cache. Nothing is written then.
        """
        return rotate_and_write_kv(
            self, query, key, value, cache, metadata, cos, sin, interleaved, q_norm, k_norm
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_accepted": (), "_tensor_check": ((), None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name in ("k_scale", "v_scale"):  # `UNIT_SCALE` is compared by identity
            setattr(self, name, checked_layer_scale(name, getattr(self, name), self.spec))
        self.handle = register(self)  # a copy of a layer is another layer

    def calc_kv_scales(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Set `k_scale` and `v_scale` so that the largest finite element of `key` and `value`
        becomes the largest finite number of the cache's dtype. No host sync.

        Call it before the layer sees its cache; for a cache that is not quantized, or has its
        scales in the page, it does nothing.
        `enable_kv_scales_calculation` of a batch calls it within the step.

        Args:
            query: not read; kept for vLLM's argument list.
            key, value: of any shape. Values of latents are part of the keys and have their scale;
                `value` is not read then.
        """
        if not self.spec.is_kv_quantized or self.spec.kv_format.scales_in_page:
            return
        largest = torch.finfo(self.spec.kv_dtype).max
        self.k_scale = scale_for(key, largest)
        self.v_scale = self.k_scale if self.spec.use_mla else scale_for(value, largest)

    def set_block_size(self, block_size: int) -> None:
        """Change the block size, for an engine that chooses it after its layers exist.

        Build metadata with a builder for the new `spec` afterwards.

        Raises:
            ContractError: the block size is below 1.
            UnsupportedConfigError: the backend of this layer does not support it; nothing changes.
        """
        spec = self.spec.replace(block_size=block_size)
        get_attn_backend(spec, self.backend, self._device, layer_name=self.prefix)
        self.impl.set_block_size(block_size)
        self.spec = spec

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Does nothing; engines call it after loading weights."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that this layer runs on."""
        return self.backend

    def extra_repr(self) -> str:
        """Sizes, scale and backend, for `print(model)`."""
        spec = self.spec
        return (
            f"{self.prefix + ', ' if self.prefix else ''}num_heads={spec.num_heads}, "
            f"num_kv_heads={spec.num_kv_heads}, head_size={spec.head_size}, "
            f"scale={self.impl.scale:.6g}, backend={self.backend.get_name()}"
        )

    def _forward_traced(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        return_lse: bool,
        output: torch.Tensor | None,
        selected_keys: SelectedKeys | None,
    ) -> Any:
        """`forward` while torch.compile traces it: everything happens inside one operator."""
        spec = self.spec
        q = per_head("query", query, spec.num_heads, spec.head_size)
        k = None if key is None else per_head("key", key, spec.num_kv_heads, spec.head_size)
        v = None if value is None else per_head("value", value, spec.num_kv_heads, spec.head_size_v)
        shape = self._output_shape(query)
        self._check_output(query, output, shape)
        if output is None:
            output = torch.empty(shape, dtype=query.dtype, device=query.device)
        heads = (query.shape[0], spec.num_heads, spec.head_size_v)
        lse = None
        if return_lse:
            lse = torch.empty(heads[:2], dtype=torch.float32, device=query.device)
        attend_opaquely(self, q, k, v, cache, metadata, output.view(heads), lse, selected_keys)
        return (output, lse) if return_lse else output

    def _notify(self, *call: Any) -> None:
        query, key, value, cache, metadata, output, lse = call
        spec = self.spec
        heads = (query.shape[0], spec.num_heads, spec.head_size_v)
        q = per_head("query", query, spec.num_heads, spec.head_size)
        k = None if key is None else per_head("key", key, spec.num_kv_heads, spec.head_size)
        v = None if value is None else per_head("value", value, spec.num_kv_heads, spec.head_size_v)
        for observer in OBSERVERS:
            observer(self, q, k, v, cache, metadata, output.view(heads), lse)


def _new_output(query: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """An output of a shape; None: like the query."""
    if shape is None:
        return torch.empty_like(query)
    return torch.empty(shape, dtype=query.dtype, device=query.device)


def _run_with(plan: Any, *call: Any) -> None:
    """Run the plan of a layer with selected keys or compressed entries: one more argument."""
    plan.run(*call)
