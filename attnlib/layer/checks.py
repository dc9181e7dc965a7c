"""Checks of a layer call that read no device memory: types, shapes, dtypes, strides, devices.

They run before anything is written or launched, once per call signature and batch layout.
`attnlib.debug.validation` also reads values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlib.cache.overlap import elements_overlap
from attnlib.errors import ContractError
from attnlib.layer.cache_checks import check_cache
from attnlib.layer.call import LayerCall
from attnlib.layer.metadata_checks import check_metadata
from attnlib.layer.tensor_checks import has_tangent, refuse_negated
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.facts import BatchFacts
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer.attention import Attention

__all__ = ["check_call", "check_output", "refuse_gradients"]


def check_call(layer: Attention, call: LayerCall) -> None:
    """Shapes, dtypes and devices of one call.

    Args:
        layer: of the call.
        call: per head.

    Raises:
        ContractError: the message names the tensor, what it is and what it must be.
        LayoutMismatchError: the backend does not read the cache's memory layout.
    """
    spec = layer.spec
    check_metadata(layer, call.metadata)
    facts = call.metadata.facts
    _check_devices(layer, call, facts)
    _check_tensors(layer, call, facts)
    if spec.score_function is not None:
        _check_score_tensors(layer, call.metadata, call.query.device)
    if call.cache is not None:
        check_cache(layer, call.cache, call)
    elif spec.is_paged:
        raise ContractError(
            f"attn_type={spec.attn_type.value} attends through a cache: pass a PagedKVCache"
        )
    elif call.key is None:
        raise ContractError(
            f"attn_type={spec.attn_type.value} caches nothing, so key and value must be given with "
            "every call"
        )
    elif call.key.shape[0] < (facts.num_actual_tokens or 0):
        raise ContractError(
            f"key has {call.key.shape[0]} rows, but the batch has {facts.num_actual_tokens} tokens"
        )
    if call.return_lse and layer.backend.capabilities.lse is not True:
        raise ContractError(
            f"backend {layer.backend.get_name()} cannot return the LSE: set needs_lse=True in the "
            "spec, so that selection finds a backend that can"
        )


def _check_devices(layer: Attention, call: LayerCall, facts: BatchFacts) -> None:
    """Whether batch and layer are on the device of the query."""
    device = call.query.device
    for name in ("query_start_loc", "seq_lens", "block_table"):
        lengths = getattr(facts, name)
        if lengths is not None and lengths.device != device:
            raise ContractError(
                f"{name} is on {lengths.device}, query on {device}: build the batch for that device"
            )
    for name, tensor in zip(("alibi_slopes", "sinks"), layer.impl.per_head_tensors, strict=True):
        if tensor is not None and tensor.device != device:
            raise ContractError(
                f"{name} is on {tensor.device}, query on {device}: move the layer with "
                f"layer.to({str(device)!r})"
            )


def _check_tensors(layer: Attention, call: LayerCall, facts: BatchFacts) -> None:
    """Shapes, dtypes and rows of query, key and value."""
    spec, (query, key, value) = layer.spec, call[:3]
    _check_tensor("query", query, (spec.num_heads, spec.head_size), spec.dtype, query.device)
    if query.shape[0] < (facts.num_actual_tokens or 0):
        raise ContractError(
            f"query has {query.shape[0]} rows, but the batch has {facts.num_actual_tokens} tokens: "
            "pass a row for each token, and metadata of this batch",
            rule="M6",
        )
    if (key is None) != (value is None):
        given = "key" if key is None else "value"
        raise ContractError(f"{given} is None and the other is not: pass both or neither")
    if key is not None and value is not None:
        sizes = (spec.num_kv_heads, spec.head_size), (spec.num_kv_heads, spec.head_size_v)
        _check_tensor("key", key, sizes[0], spec.dtype, query.device)
        _check_tensor("value", value, sizes[1], spec.dtype, query.device)
        if key.shape[0] != value.shape[0]:
            raise ContractError(
                f"key has {key.shape[0]} rows and value {value.shape[0]}; they must agree"
            )


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor.dim() != 3 or tensor.shape[1:] != heads:
        raise ContractError(
            f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, {heads[0]}, {heads[1]}] "
            f"or [tokens, {heads[0] * heads[1]}]"
        )
    if tensor.dtype != dtype:
        other = (
            f", or make layer and cache with a spec of dtype={tensor.dtype}"
            if tensor.is_floating_point() and tensor.itemsize > 1
            else ""
        )
        raise ContractError(f"{name} is {tensor.dtype}, the spec says {dtype}: convert it{other}")
    if tensor.device != device:
        raise ContractError(
            f"{name} is on {tensor.device}, query on {device}: all tensors of a call must be on "
            "one device"
        )
    if tensor.stride(2) != 1 and tensor.shape[2] > 1:
        raise ContractError(
            f"{name} has stride {tensor.stride(2)} along the head; the last stride must be 1",
            rule="P9",
        )
    if tensor.is_neg():
        refuse_negated(name, tensor)


def _check_score_tensors(
    layer: Attention, metadata: AttentionMetadata, device: torch.device
) -> None:
    """Whether the layer has the tensors of its score function in a form that kernels read, and all
    of its tensors are on one device."""
    function, facts = layer.spec.score_function, metadata.facts
    assert function is not None  # the caller has checked
    own = dict(zip(function.layer_tensors, layer.impl.layer_score_tensors, strict=True))
    function.check_tensors(own, function.layer_tensors, "layer")
    made_for = function if facts.spec is None else facts.spec.score_function
    if made_for != function and made_for is not None and function.batch_tensors:
        raise ContractError(
            f"metadata was built for score function {made_for}, the layer's spec has {function}: "
            "build it with the builder of this layer's group",
            rule="M10",
        )
    batch = facts.score_tensors or {}
    if missing := [name for name in function.batch_tensors if name not in batch]:
        parts = (metadata.prefill_metadata, metadata.decode_metadata)  # of a composite
        if not any(part is not None and part.facts.score_tensors for part in parts):
            raise ContractError(
                f"metadata has no batch tensor {missing[0]!r}, which score function {function} "
                "reads: build it with the builder of this layer's group",
                rule="M10",
            )
    for name, tensor in {**own, **batch}.items():
        if tensor.device != device:
            raise ContractError(
                f"{name} of score function {function} is on {tensor.device}, query on {device}: "
                "move it to the device of the layer",
                rule="M10",
            )


def check_output(spec: AttentionSpec, call: LayerCall) -> None:
    """Whether the output that the caller gives fits.

    Raises:
        ContractError: another shape, dtype, device or last stride, or rows that share memory.
    """
    query, output = call.query, call.output
    if output is None:
        return
    shape = call.output_shape(spec)
    if output.shape not in (shape, (query.shape[0], spec.num_heads, spec.head_size_v)):
        raise ContractError(
            f"output has shape {tuple(output.shape)}; it must be {list(shape)}", rule="P9"
        )
    if output.dtype != query.dtype or output.device != query.device or output.stride(-1) != 1:
        raise ContractError(
            f"output is {output.dtype} on {output.device} with last stride "
            f"{output.stride(-1)}; it must be {query.dtype} on {query.device} with last "
            "stride 1: pass such a tensor, or None for a new one",
            rule="P9",
        )
    if elements_overlap(output):
        raise ContractError(
            f"output has strides {output.stride()} for shape {tuple(output.shape)}, so that rows "
            "share memory: pass separate memory for each row",
            rule="P9",
        )


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Refuse tensors whose gradients are recorded: they require one, or have a tangent of forward
    mode, also under `torch.no_grad()`.

    Raises:
        ContractError: one does.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        _refuse(_GRADIENTS)
    if has_tangent(*tensors):
        _refuse(_TANGENTS)


def _refuse(message: str) -> None:
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=message)  # the reason why `fullgraph=True` finds none
    _raise(message)


def _raise(message: str) -> None:
    raise ContractError(message)


# As `torch.compiler.disable` does, without its import: torch 2.10 fails where it traces a `raise`.
_raise._torchdynamo_disable = True  # type: ignore[attr-defined]

_GRADIENTS = (
    "query, key or value requires a gradient, and attnlib computes no gradients: run the model "
    "under torch.inference_mode() or torch.no_grad()"
)
_TANGENTS = (
    "query, key or value has a tangent of forward-mode gradients, and attnlib computes no "
    "gradients: pass its primal (torch.autograd.forward_ad.unpack_dual)"
)
