"""The layer: `Attention(q, k, v, cache, metadata)` writes the new keys, then attends (P7).

Everything a step needs is an argument. The layer keeps what belongs to one layer of one model: its
spec, backend and impl, scales, slopes and sinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import UNIT_SCALE, PagedKVCache, Scale
from attnlib.compile.objects import register
from attnlib.errors import ContractError
from attnlib.layer.arguments import layer_from_arguments
from attnlib.layer.call import CallMemory, ExtraKeys, LayerCall, call_layer, new_lse, new_output
from attnlib.layer.metadata_checks import extra_keys
from attnlib.layer.operator import attend_opaquely
from attnlib.layer.per_head import make_impl, own_per_head_tensors
from attnlib.layer.plans import find_plan, run_plan
from attnlib.layer.rotary import rotate_and_write_kv
from attnlib.layer.scales import checked_layer_scale, set_scales
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.ops.rotary import HeadNorm
from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.selection import get_attn_backend
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec

__all__ = ["Attention"]


class Attention(nn.Module):
    """One attention layer over a paged KV cache.

    Args:
        spec: what the layer needs.
        backend: a name, a class, or None for selection by `use_backend`, ATTNLIB_BACKEND, priority.
        scale: softmax scale; None means 1/sqrt(head_size).
        alibi_slopes: one slope per query head, when `spec.has_alibi`.
        sinks: one sink logit per query head (M4), when `spec.has_sink`.
        score_tensors: the layer tensors of `spec.score_function` by name (M10). They become buffers
            (parameters stay parameters) with the prefix `score_`.
        k_scale, v_scale: scales of a quantized cache (M9), finite and positive. They become the
            scales of the layer's cache at the first call; 1 uses the scales of the cache.
        kv_sharing_target_layer_name: the layer whose cache this one reads and does not write (P8).
        prefix: the layer's name, for messages and records.
        device: where the layer will run; None means a GPU if torch sees one, else the CPU.

    Raises:
        UnknownBackendError: no backend of this name is registered.
        BackendUnavailableError: the backend cannot run on this machine.
        UnsupportedConfigError: the backend does not support the spec.
    """

    _has_calculated = False  # scales from a step
    _has_per_head: bool  # slopes, sinks or score tensors
    _is_plain = True  # `forward` was not replaced, and the module not compiled

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
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.prefix = prefix
        self.impl = make_impl(self, scale, alibi_slopes, sinks, score_tensors)
        own_per_head_tensors(self)
        self.k_scale = checked_layer_scale("k_scale", k_scale, spec)
        self.v_scale = checked_layer_scale("v_scale", v_scale, spec)
        self.writes = spec.is_paged and not spec.kv_sharing
        self._memory = CallMemory()
        self.handle = register(self)

    from_arguments = classmethod(layer_from_arguments)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: AttentionMetadata,
        return_lse: bool = False,
        *,
        output: torch.Tensor | None = None,
        selected_keys: SelectedKeys | None = None,
        compressed_keys: CompressedKeys | None = None,
        query_tensors: QueryTensors | None = None,
    ) -> Any:
        """Write the new keys and values to the cache, then attend.

        Args:
            query: `[T, Hq * D]` or `[T, Hq, D]`, strided (P9). T may exceed the batch's tokens
                (padding); the output of those rows is 0 (M6).
            key, value: `[T, Hkv * D]` and `[T, Hkv * Dv]`, or per head; None for both when they are
                in the cache already, or the layer shares another layer's cache (P8).
            cache: this layer's cache; None for encoders, whose keys are not cached.
            metadata: the batch's metadata, from the builder of the layer's backend.
            return_lse: also return the log of the softmax denominator (M5); see `spec.needs_lse`.
            output: where to write, `[T, Hq, Dv]` or `[T, Hq * Dv]`; None allocates.
            selected_keys: the lists of keys that the queries attend to (M11), exactly when the spec
                has a `key_selection`.
            compressed_keys, query_tensors: the entries of the second key stream (M17) and tensors
                of the query tokens (M21, M22), if the spec has any. Not under torch.compile.

        Returns:
            The output, flat or per head like the query; with `return_lse` also the LSE `[T, Hq]`.

        Raises:
            ContractError: a tensor does not fit the spec, the cache or the batch.
            LayoutMismatchError: the backend does not read the cache's layout. Nothing was written.
        """
        given: ExtraKeys | None = selected_keys
        if compressed_keys is not None or query_tensors is not None:
            given = extra_keys(selected_keys, compressed_keys, query_tensors)
        call = LayerCall(query, key, value, cache, metadata, output, return_lse, given)
        if torch.compiler.is_compiling():
            return attend_opaquely(self, call)
        plan, shape = find_plan(self, call)
        output = new_output(query, shape) if output is None else output
        lse = new_lse(self.spec, query) if return_lse else None
        run_plan(self, plan, call, output, lse)
        return (output, lse) if return_lse else output

    _own_forward = forward
    __call__ = call_layer

    def rotate_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: AttentionMetadata,
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
            key, value: as in `forward`. Without them, only queries rotate; so it is in a layer that
                shares the cache of another one (P8).
            cache, metadata: as in `forward`.
            cos, sin: `[T, half]`, the angles of each token, in the dtype of the query or float32,
                for the first 2 * half elements of a head. None for both skips the rotation.
            interleaved: rotate elements (0, 1), (2, 3), ... of a head; else (0, half), ...
            q_norm, k_norm: RMSNorm of each query and key head before the rotation, or None.

        Returns:
            The rotated queries, flat or per head like `query`.

        Raises:
            ContractError: as `forward`, or the layer has no keys to rotate: latents (P10).
        """
        return rotate_and_write_kv(
            self, query, key, value, cache, metadata, cos, sin, interleaved, q_norm, k_norm
        )

    def __setattr__(self, name: str, value: Any) -> None:
        fixed = ("backend", "kv_sharing_target_layer_name", "spec", "writes")
        if name in fixed and name in self.__dict__:
            raise ContractError(
                f"{name} of layer {self.prefix or '(unnamed)'} cannot be assigned, because its "
                "impl was made for the one it has: make a new layer, or call set_block_size"
            )
        if name in ("forward", "_compiled_call_impl"):
            self.__dict__["_is_plain"] = False
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": CallMemory()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name in ("k_scale", "v_scale"):  # `UNIT_SCALE` is compared by identity
            setattr(self, name, checked_layer_scale(name, getattr(self, name), self.spec))
        self.handle = register(self)  # a copy of a layer is another layer

    def calc_kv_scales(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Set `k_scale` and `v_scale` so that the largest finite element of `key` and `value`
        becomes the largest finite number of the cache's dtype. No host sync.

        Call it before the layer sees its cache; for a cache that is not quantized, or has its
        scales in the page, it does nothing. A batch with `enable_kv_scales_calculation` does it
        within the step.

        Args:
            query: not read; kept for vLLM's argument list.
            key, value: of any shape. Values of latents have the scale of the keys.
        """
        set_scales(self, key, value)

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
        self.__dict__["spec"] = spec

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Does nothing; engines call it after loading weights."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that this layer runs on."""
        return self.backend

    def extra_repr(self) -> str:
        """Sizes, scale and backend, for `print(model)`."""
        names = ("num_heads", "num_kv_heads", "head_size")
        sizes = ", ".join(f"{name}={getattr(self.spec, name)}" for name in names)
        name = f"{self.prefix}, " if self.prefix else ""
        return f"{name}{sizes}, scale={self.impl.scale:.6g}, backend={self.backend.get_name()}"
