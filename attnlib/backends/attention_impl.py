"""The base class of implementations: the attention of one layer on one backend.

Only `forward` is required.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import torch

from attnlib.backends.per_head_tensors import check_per_head
from attnlib.backends.step_plan import LayerGroup, StepPlan, group_of
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.kv_rotation import KVRotation
from attnlib.metadata.compressed import CompressedKeys
from attnlib.ops.dispatch import operation
from attnlib.ops.params import AttentionParams
from attnlib.ops.rotary import HeadNorm
from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec

__all__ = ["AttentionImpl", "check_in_place", "score_attribute"]


class MaskedBatch(Protocol):
    """What the parameters of attention follow from in a batch."""

    @property
    def causal(self) -> bool | torch.Tensor:
        """For the batch, or `[R]` bool, per request."""

    @property
    def query_bias(self) -> torch.Tensor | None:
        """`[T, >= max_query_len]` float32, added to the scores of the query span."""

    @property
    def score_tensors(self) -> Mapping[str, torch.Tensor] | None:
        """Batch tensors of the score function by name."""


class AttentionImpl(ABC):
    """The attention of one layer on one backend.

    Args:
        spec: requirements of the layer; already accepted by the backend.
        scale: softmax scale; None means 1/sqrt(head_size).
        alibi_slopes: `[Hq]` of a floating-point dtype, when `spec.has_alibi`.
        sinks: `[Hq]` of a floating-point dtype, when `spec.has_sink`.
        score_tensors: the layer tensors of `spec.score_function` by name (M10).
        kv_sharing_target_layer_name: the layer whose cache this one reads (P8).
        config: settings of the backend.
        prefix: name of the layer, for messages.

    Attributes:
        alibi_slopes, sinks: `[Hq]` float32 or None. A layer owns these tensors as parameters or
            buffers. They are read from the layer in every call.

    Raises:
        ContractError: slopes or sinks contradict the spec, or have a wrong shape or dtype.
    """

    _group: LayerGroup | None = None
    rotates: ClassVar[bool] = False
    """Whether it applies `spec.kv_rotation` (P15), as `backends.rotated` does."""
    write_rotation: KVRotation | None = None
    """What writes rotate heads by, where `backends.rotated` leaves it to them."""

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        scale: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        score_tensors: Mapping[str, torch.Tensor] | None = None,
        kv_sharing_target_layer_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        if spec.kv_rotation is not None and not self.rotates:
            raise ContractError(
                f"{type(self).__name__} does not rotate heads, and the spec has kv_rotation="
                f"{spec.kv_rotation}: make the layer with Attention, or the impl with "
                "backends.rotated.make_backend_impl",
                rule="P15",
            )
        self.spec = spec
        self.scale = spec.head_size**-0.5 if scale is None else float(scale)
        check_per_head("alibi_slopes", alibi_slopes, spec.has_alibi, "has_alibi", spec.num_heads)
        check_per_head("sinks", sinks, spec.has_sink, "has_sink", spec.num_heads)
        function = spec.score_function
        if function is not None:
            function.check_tensors(score_tensors, function.layer_tensors, "layer")
        self._score_names = () if function is None else function.layer_tensors
        given = {score_attribute(name): (score_tensors or {})[name] for name in self._score_names}
        self._owner: Any = SimpleNamespace(alibi_slopes=alibi_slopes, sinks=sinks, **given)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.config = dict(config or {})
        self.prefix = prefix

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_group"] = None  # plans depend on the impl's attributes
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None}  # groups are interned per process

    @property
    def alibi_slopes(self) -> torch.Tensor | None:
        """`[Hq]` float32, or None."""
        return _as_float32(self._owner.alibi_slopes)

    @alibi_slopes.setter
    def alibi_slopes(self, values: torch.Tensor | None) -> None:
        self._owner.alibi_slopes = values

    @property
    def sinks(self) -> torch.Tensor | None:
        """`[Hq]` float32, or None."""
        return _as_float32(self._owner.sinks)

    @sinks.setter
    def sinks(self, values: torch.Tensor | None) -> None:
        self._owner.sinks = values

    def set_block_size(self, block_size: int) -> None:
        """Change the block size of `spec`; see `Attention.set_block_size`. An impl that derives
        values from the block size when it is created overrides this method."""
        self.spec = self.spec.replace(block_size=block_size)

    def read_per_head_tensors_from(self, owner: Any) -> None:
        """Read slopes, sinks and score tensors from now on from attributes of `owner`, a layer."""
        self._owner = owner

    @property
    def per_head_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Slopes and sinks in the dtype in which they are stored."""
        return self._owner.alibi_slopes, self._owner.sinks

    @property
    def layer_score_tensors(self) -> tuple[torch.Tensor, ...]:
        """The layer tensors of the score function, in its order; of the impl of a call (`of_call`)
        also its query tensors."""
        return tuple(getattr(self._owner, score_attribute(name)) for name in self._score_names)

    def of_call(self, given: QueryTensors) -> AttentionImpl:
        """The impl of one call that passes tensors of its query tokens (M21, M22): `forward` reads
        them as score tensors and sinks of the layer.

        Args:
            given: the tensors of this call; checked.
        """
        function, names = self.spec.score_function, self._score_names
        if function is not None:
            names = (*names, *function.query_tensors)
        own = dict(zip(self._score_names, self.layer_score_tensors, strict=True))
        tensors = {score_attribute(name): {**own, **given.tensors}[name] for name in names}
        slopes, sinks = self.per_head_tensors
        owner = SimpleNamespace(
            alibi_slopes=slopes, sinks=sinks if given.sinks is None else given.sinks, **tensors
        )
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__, _owner=owner, _score_names=names)
        return bound

    @property
    def group(self) -> LayerGroup:
        """The group of impls whose plans are interchangeable: same class, equal spec, scale and
        config. An impl whose methods were replaced on the instance has a group of its own."""
        found: LayerGroup | None = self._group
        if found is None:
            found = self.__dict__["_group"] = group_of(self)
        return found

    def attention_params(
        self, metadata: MaskedBatch, cache: PagedKVCache | None = None
    ) -> AttentionParams:
        """The attention parameters of this layer for a batch, for the operations of `attnlib.ops`.

        Args:
            metadata: has `causal`, `query_bias` and `score_tensors`, like `PagedMetadata`.
            cache: source of the KV scales; None means scales of 1.
        """
        spec = self.spec
        return AttentionParams(
            scale=self.scale,
            causal=metadata.causal,
            window=spec.visible_window.as_kernel_args(),
            attention_chunk_size=spec.attention_chunk_size or 0,
            logits_soft_cap=spec.logits_soft_cap or 0.0,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            query_bias=metadata.query_bias,
            score_function=spec.score_function,
            allow_fp8_queries=spec.allow_fp8_queries,
            score_tensors=self._all_score_tensors(metadata),
            k_scale=1.0 if cache is None else cache.k_scale,
            v_scale=1.0 if cache is None else cache.v_scale,
            k_format=None if cache is None else cache.page_formats[0],
            v_format=None if cache is None else cache.page_formats[1],
        )

    def _all_score_tensors(self, metadata: MaskedBatch) -> dict[str, torch.Tensor]:
        """The layer tensors and the batch tensors of the score function, by name."""
        if self.spec.score_function is None:
            return {}
        layer = dict(zip(self._score_names, self.layer_score_tensors, strict=True))
        return layer | dict(metadata.score_tensors or {})

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Compute attention over the cache, which contains the new keys already (P7).

        Args:
            query: `[T, Hq, D]`, strided (P9).
            cache: the cache of this layer.
            metadata: the result of this backend's builder.
            output: `[T, Hq, Dv]`, strided, written in place. Rows at or past the tokens of the
                batch are set to 0 (M6).
            lse: `[T, Hq]` float32, written in place; None if not needed (M5).
        """

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values to their slots (P4); by default with the Triton kernel on a
        GPU, and with torch operations elsewhere and for open formats (P16).

        Args:
            key: `[T, Hkv, D]`, strided; may be longer than `slot_mapping`.
            value: `[T, Hkv, Dv]`, strided.
            cache: the cache of this layer.
            slot_mapping: `[T]` int64; -1 writes nothing.
        """
        write = operation("cache_write", "write_kv", key, in_torch=self.spec.has_open_format)
        write(
            key,
            value,
            cache.key_cache,
            cache.value_cache,
            slot_mapping,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            k_format=cache.page_formats[0],
            v_format=cache.page_formats[1],
        )

    @property
    def rotates_writes(self) -> bool:
        """Whether `write_kv`, `rotate_and_write_kv` and plans can rotate heads for the cache, by
        `write_rotation` (P15). Others are given heads that are rotated already. A class that
        replaces `write_kv` of one that can must do it, too."""
        return False

    def rotate_heads(
        self,
        heads: torch.Tensor,
        seed: int = 0,
        *,
        inverse: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate heads for the cache (P15), by `ops.hadamard`'s arithmetic; by default with the
        Triton kernel on a GPU, and with torch operations elsewhere.

        Args:
            heads: `[T, H, D]`.
            seed: of the signs.
            inverse: rotate back.
            out: like `heads`, which it may be; None allocates.
        """
        rotate = operation("hadamard", "rotate_heads", heads)
        result: torch.Tensor = rotate(heads, seed, inverse=inverse, out=out)
        return result

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
        """Normalize and rotate queries and keys, and write keys and values (P11); by default with
        separate operations: a rotation of the keys, `write_kv`, a rotation of the queries.

        A backend that does it in one launch overrides this and declares `rotary_write`. A class
        that overrides `write_kv` alone gets the separate operations.

        Args:
            query: `[T, Hq, D]` before normalization and rotation, strided.
            key: `[T, Hkv, D]` before both, strided; None where nothing is written (P8).
            value: `[T, Hkv, Dv]`; None with `key`.
            cache: the cache of this layer.
            slot_mapping: `[T]` int64, -1 writes nothing; None where nothing is written.
            cos, sin: `[T, half]`, the angles of each token, or None without a rotation.
            interleaved: which elements of a head form a pair (`ops.rotary`).
            q_norm, k_norm: RMSNorm of query and key heads, or None.

        Returns:
            The rotated queries, `[T, Hq, D]`.
        """
        rotate = operation("rotary_write", "rotate", query)
        if key is not None and value is not None and slot_mapping is not None:
            new = key[: slot_mapping.shape[0]]
            rotated = rotate(new, cos, sin, interleaved=interleaved, norm=k_norm)
            self.write_kv(rotated, value, cache, slot_mapping)
        out: torch.Tensor = rotate(query, cos, sin, interleaved=interleaved, norm=q_norm)
        return out

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
        """Prepare the calls of `rotate_and_write_kv` over a batch that differ from this one in
        addresses, values and the eps of norms only.

        Args:
            query, key, value, cache, slot_mapping, cos, sin, interleaved, q_norm, k_norm: as in
                `rotate_and_write_kv`. The memory of `slot_mapping` stays the same.

        Returns:
            `run(query, key, value, cache, cos, sin, q_norm, k_norm)`, which returns the rotated
            queries. With None (the default) the layer calls `rotate_and_write_kv` instead.
        """
        return None

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> StepPlan | None:
        """Prepare the calls with one signature over a batch.

        The layer calls `plan` once per batch and call signature, after its checks and before any
        write. It runs the plan for every call with that signature over the same `metadata`, by any
        layer of the group. The signature covers the layer group and dtypes, shapes, strides and
        devices of all tensors, so that calls differ in addresses and values only. A plan may store
        values from `metadata`: assigning a field of the metadata drops its plans.

        Args:
            signature: hashable; also a key for objects that outlive the batch (compiled launches).
            query: `[T, Hq, D]` of the first such call, like all tensors here.
            key, value: `[T, Hkv, D]` and `[T, Hkv, Dv]`; None where the layer writes nothing.
            cache: the cache of the layer.
            metadata: the result of this backend's builder.
            output: `[T, Hq, Dv]`.
            lse: `[T, Hq]` float32, or None.

        Returns:
            The plan. With None (the default) the layer calls `write_kv` and `forward` instead.
        """
        return None

    def rotating_plan(self, rotation: KVRotation, *args: Any) -> StepPlan | None:
        """`plan` of calls with plain queries over rotated heads (P15), by kernels that rotate them,
        and outputs back unless its `rotated.values` is False.

        Args:
            rotation: of the cache; the plan rotates what it writes by `write_rotation`.
            args: as of `plan`.

        Returns:
            The plan; with None (the default) the caller rotates.
        """
        return None

    def forward_selected(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        selected_keys: SelectedKeys,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """`forward` over the selected keys only (M11), for layers with `spec.key_selection`.

        Args:
            selected_keys: the lists of this call; shapes and dtypes are checked.
            query, cache, metadata, output, lse: see `forward`.

        Raises:
            UnsupportedConfigError: the backend does not support selected keys.
        """
        raise UnsupportedConfigError(
            f"{type(self).__name__} does not support key_selection; use another backend, for "
            "example torch"
        )

    def forward_compressed(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        compressed_keys: CompressedKeys,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """`forward` over the layer's own keys and compressed entries under one softmax (M17), for
        layers with `spec.compressed_entries`.

        Args:
            compressed_keys: the entries of this call; sizes and dtypes are checked.
            query, cache, metadata, output, lse: see `forward`.

        Raises:
            UnsupportedConfigError: the backend does not support compressed entries.
        """
        raise UnsupportedConfigError(
            f"{type(self).__name__} does not support compressed_entries; use another backend, for "
            "example torch"
        )

    def forward_unpaged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Compute attention over keys that are not cached (encoders).

        Args:
            query: `[T, Hq, D]`, strided (P9).
            key, value: `[Tk, Hkv, D]` and `[Tk, Hkv, Dv]`, packed like the queries.
            metadata, output, lse: see `forward`.

        Raises:
            UnsupportedConfigError: the backend supports paged keys only.
        """
        raise UnsupportedConfigError(
            f"{type(self).__name__} supports keys in a paged cache only; "
            f"attn_type={self.spec.attn_type.value} needs another backend, for example torch"
        )


def score_attribute(name: str) -> str:
    """The attribute of a layer that holds a layer tensor of its score function."""
    return f"score_{name}"


def check_in_place(impl: AttentionImpl, result: object) -> None:
    """Refuse an impl that returns its result; `output` would keep what it held before.

    Raises:
        ContractError: `result` is not None.
    """
    if result is not None:
        raise ContractError(
            f"{type(impl).__name__}.forward returned a {type(result).__name__}; it must write its "
            "result to `output` in place and return None"
        )


def _as_float32(values: torch.Tensor | None) -> torch.Tensor | None:
    return values if values is None or values.dtype == torch.float32 else values.float()
