"""One call of a layer: its value, its signature, and the quick path of a call like the one before.

The quick path skips the dispatch of `nn.Module`, which takes longer than the comparison. Where that
dispatch would do more than call `Attention.forward`, for hooks, a replaced `forward` or a compiled
module, it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, empty_like, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from attnlib.cache.storage import UNIT_SCALE, PagedKVCache
from attnlib.errors import ContractError
from attnlib.instrumentation import ENVIRONMENT, OBSERVERS, VALIDATE_KEY
from attnlib.layer.per_head import own_tensors, per_head_signature
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.backends.step_plan import StepPlan
    from attnlib.layer.attention import Attention

__all__ = [
    "CallMemory",
    "ExtraKeys",
    "LayerCall",
    "RecentPlan",
    "call_layer",
    "call_signature",
    "new_lse",
    "new_output",
    "notify",
    "per_head",
]

_EXTRA_NAMES = ("selected_keys", "compressed_keys", "query_tensors")
ExtraKeys = SelectedKeys | CompressedKeys | QueryTensors
"""What a call passes about keys besides its own, or about its query tokens."""


class LayerCall(NamedTuple):
    """The arguments of one call; `Attention.forward` describes them. Tensors may be flat or per
    head. `extra` are the selected keys, the compressed entries or the tensors of query tokens."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    cache: PagedKVCache | None
    metadata: AttentionMetadata
    output: torch.Tensor | None = None
    return_lse: bool = False
    extra: ExtraKeys | None = None

    def per_head(self, spec: AttentionSpec) -> LayerCall:
        """The call with `[tokens, heads, head size]` views of query, key and value.

        Raises:
            ContractError: a flat tensor of another width.
        """
        query, key, value = self.query, self.key, self.value
        if query.dim() == 2:
            query = per_head("query", query, spec.num_heads, spec.head_size)
        if key is not None and key.dim() == 2:
            key = per_head("key", key, spec.num_kv_heads, spec.head_size)
        if value is not None and value.dim() == 2:
            value = per_head("value", value, spec.num_kv_heads, spec.head_size_v)
        return LayerCall(query, key, value, *self[3:])

    def output_shape(self, spec: AttentionSpec) -> tuple[int, ...]:
        """Shape of the output that the call allocates: flat or per head like the query."""
        rows = self.query.shape[0]
        if self.query.dim() == 2:
            return (rows, spec.num_heads * spec.head_size_v)
        return (rows, spec.num_heads, spec.head_size_v)


def per_head(name: str, tensor: torch.Tensor, num_heads: int, head_size: int) -> torch.Tensor:
    """`[tokens, num_heads, head_size]` of a flat or per-head tensor; a view, no copy.

    Raises:
        ContractError: a flat tensor of another width.
    """
    if tensor.dim() != 2:
        return tensor  # `check_call` checks the rest
    if tensor.shape[1] != num_heads * head_size:
        raise ContractError(
            f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, {num_heads}, "
            f"{head_size}] or [tokens, {num_heads * head_size}]"
        )
    return tensor.view(tensor.shape[0], num_heads, head_size)


def new_output(query: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """An output of a shape; None: like the query."""
    if shape is None:
        return torch.empty_like(query)
    return torch.empty(shape, dtype=query.dtype, device=query.device)


def new_lse(spec: AttentionSpec, query: torch.Tensor) -> torch.Tensor:
    """The LSE of a call, `[T, Hq]` float32."""
    rows = (query.shape[0], spec.num_heads)
    return torch.empty(rows, dtype=torch.float32, device=query.device)


def call_signature(layer: Attention, call: LayerCall) -> tuple[Any, ...]:
    """The one key of a call: everything that checks and launches follow from, besides the batch and
    addresses."""
    impl = layer.impl
    query, key, value, cache, _, output, return_lse, extra = call
    stored = None
    if cache is not None:
        keys, values, stored = cache.key_cache, cache.value_cache, cache._signature
        # `signature` compares the same; every first layer of a step comes here.
        views = keys.shape, keys.stride(), values.shape, values.stride()
        if stored is None or stored.views != views:
            stored = cache.signature
    signature = (
        impl._group or impl.group,
        stored,
        query.dtype,
        query.shape,
        query.stride(),
        query.device,
        query.requires_grad,
        None if key is None else (key.dtype, key.shape, key.stride(), key.device),
        None if value is None else (value.dtype, value.shape, value.stride(), value.device),
        None if output is None else (output.dtype, output.shape, output.stride(), output.device),
        return_lse,
        torch.is_grad_enabled(),
        per_head_signature(layer) if layer._has_per_head else None,
    )
    return signature if extra is None else (*signature, extra.signature)


def notify(
    layer: Attention, call: LayerCall, output: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Tell the observers of a call that has run, with tensors per head."""
    spec, heads = layer.spec, call.per_head(layer.spec)
    rows = (call.query.shape[0], spec.num_heads, spec.head_size_v)
    for observer in OBSERVERS:
        observer(layer, *heads[:5], output.view(rows), lse)


class CallMemory:
    """What a layer remembers of its calls; a copy of the layer remembers nothing.

    Attributes:
        accepted: the last call that passed `check_call`, and the shape of the output that such a
            call allocates (None: like the query).
        tensor_check: the last signature that was remembered, and the comparison of its tensors.
    """

    __slots__ = ("accepted", "tensor_check")

    def __init__(self) -> None:
        self.accepted: tuple[tuple[Any, ...], tuple[int, ...] | None] = (), None
        self.tensor_check: tuple[Any, Any] = ((), None)


class RecentPlan(NamedTuple):
    """The plan of the call before, with what a call must agree in to use it. `check` compares the
    signatures of the tensors. `call`, where there is one, compares them too, and runs the plan
    (`StepPlan.bind_call`). One of both may be None."""

    group: Any
    cache_signature: Any
    return_lse: bool
    allocates: bool
    check: Callable[..., bool] | None
    per_head: tuple[Any, ...] | None
    shape: tuple[int, ...] | None
    plan: StepPlan
    call: Callable[..., bool] | None


def call_layer(
    self: Attention,
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
    """See `Attention.forward`."""
    recent = None if is_dynamo_compiling() else getattr(metadata, "recent_plan", None)
    if (
        recent is not None
        and cache is not None
        and (selected_keys is None and compressed_keys is None and query_tensors is None)
        and not (self._forward_hooks or self._forward_pre_hooks)
        and not (_global_forward_hooks or _global_forward_pre_hooks)
        and (self._is_plain and (cls := type(self)).forward is cls._own_forward)
        and (VALIDATE_KEY not in ENVIRONMENT and forward_ad._current_level < 0)
    ):
        group, cache_signature, with_lse, allocates, check, per_head, shape, plan, call = recent
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
            and isinstance(query, Tensor)
        ):
            out = output
            if out is None:
                out = empty_like(query) if shape is None else new_output(query, shape)
            lse = new_lse(self.spec, query) if with_lse else None
            own = () if per_head is None else own_tensors(self)
            keys, values = cache.key_cache, cache.value_cache
            done = call is not None and call(query, keys, values, out, lse, key, value, *own)
            if not done and check is not None:
                same = per_head is None or per_head == per_head_signature(self)
                done = same and check(query, key, value, keys, values, *(out,)[allocates:])
                if done:
                    plan.run(impl, query, key, value, cache, out, lse)
            if done:
                if OBSERVERS:
                    notify(self, LayerCall(query, key, value, cache, metadata), out, lse)
                return (out, lse) if with_lse else out
    given: dict[str, Any] = {"output": output}  # hooks see no arguments that were left out
    if not (selected_keys is None and compressed_keys is None and query_tensors is None):
        extras = (selected_keys, compressed_keys, query_tensors)
        named = zip(_EXTRA_NAMES, extras, strict=True)
        given.update((name, extra) for name, extra in named if extra is not None)
    return nn.Module.__call__(self, query, key, value, cache, metadata, return_lse, **given)
