"""Masks that need a `[T, S]` tensor: 4-D masks of the user, image spans, a bias per head (T5).

If the new tokens are all keys and all heads share the mask, the mask is passed to the backend as an
explicit bias over the query span (`MaskKind.QUERY_BIAS`). Everything else is computed with torch
operations; on a CPU by those of the torch backend, where all heads share the mask.
"""

from __future__ import annotations

import logging
from weakref import WeakSet

import torch
from torch import nn

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers.batch_plan import pack
from attnlib.integrations.transformers.layers import (
    Call,
    builder_for,
    is_transient,
    layer_for,
    layer_name,
)
from attnlib.integrations.transformers.pages import token_pages
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.autocast import without_autocast
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows
from attnlib.selection import explain, get_attn_backend
from attnlib.spec import MaskKind

__all__ = ["attend_dense", "dense_weights"]

logger = logging.getLogger("attnlib")
_logged: WeakSet[nn.Module] = WeakSet()


def attend_dense(
    call: Call, mask: torch.Tensor | None, bias: torch.Tensor | None, reason: str
) -> torch.Tensor:
    """Attention with an evaluated mask, `[B, T, Hq, Dv]`.

    Args:
        call: the attention call. Its window and causality are not applied: the mask contains them.
        mask: `[B or 1, Hq or 1, T or 1, S]`, bool (True where visible) or added to the scores; None
            for none.
        bias: `[B or 1, Hq or 1, T or 1, S]` added to the scores, or None.
        reason: why no kernel argument expresses the mask, for messages.

    Raises:
        ContractError: a mask of another shape or of integers.
        UnsupportedConfigError: the user requires a backend that cannot apply the mask.
    """
    added = _added(call, mask, bias)
    batch, heads, queries, keys = (call.query.shape[0], *added.shape[1:3], call.key.shape[2])
    is_square = queries == keys == call.query.shape[2]
    if heads == 1 and is_square and bias is None and not is_transient():
        return _attend_by_query_bias(
            call, added.expand(batch, 1, queries, keys).reshape(batch * queries, keys)
        )
    _check_torch_is_allowed(call, reason)
    of_layer = call.sinks is None or call.sinks.dim() != 4
    if of_layer and call.query.is_cpu and heads == 1 < queries == call.query.shape[2]:
        return _attend_by_rows(call, added.expand(batch, 1, queries, keys))
    weights = _weights(call, added)
    grouped = weights.view(batch, call.key.shape[1], -1, keys)
    out = torch.matmul(grouped, call.value.to(weights.dtype))
    return out.view(batch, -1, queries, call.value.shape[3]).transpose(1, 2).to(call.query.dtype)


def dense_weights(call: Call, mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """The weights after the softmax, `[B, Hq, T, S]` in the query's dtype ("attentions").

    Args:
        call, mask, bias: as in `attend_dense`.

    Raises:
        ContractError: a mask of another shape or of integers.
    """
    return _weights(call, _added(call, mask, bias)).to(call.query.dtype)


def _added(call: Call, mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """The sum of mask and bias, float32 `[B or 1, Hq or 1, T, S]`."""
    shape = (1, 1, call.query.shape[2], call.key.shape[2])
    added = torch.zeros(shape, dtype=torch.float32, device=call.query.device)
    for name, term in (("attention_mask", mask), ("position_bias", bias)):
        if term is None:
            continue
        _check_term(name, term, call)
        term = term.to(call.query.device)
        if term.dtype == torch.bool:
            term = torch.zeros_like(term, dtype=torch.float32).masked_fill_(~term, -torch.inf)
        else:  # transformers marks hidden keys by the lowest number of the dtype
            term = term.float().masked_fill(term <= torch.finfo(term.dtype).min, -torch.inf)
        added = added + term
    return added


def _check_term(name: str, term: torch.Tensor, call: Call) -> None:
    limits = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    if term.dim() != 4 or any(
        size not in (1, limit) for size, limit in zip(term.shape, limits, strict=True)
    ):
        raise ContractError(
            f"{name} has shape {tuple(term.shape)}; each of its 4 sizes must be 1 or that of "
            f"{list(limits)} (batch, heads, T, S), with the S keys that the layer's cache has kept"
        )
    if term.dtype != torch.bool and not term.is_floating_point():
        raise ContractError(
            f"{name} is {term.dtype}; a mask of 4 sizes is bool, True where a key is visible, or "
            f"floating-point numbers that are added to the scores: convert it with .bool()"
        )


def _weights(call: Call, added: torch.Tensor) -> torch.Tensor:
    """Softmax of the scores, float32 `[B, Hq, T, S]`; a row without visible keys is 0 (M5)."""
    batch, heads, queries, head_size = call.query.shape
    kv_heads, keys = call.key.shape[1:3]
    rows = call.query.float().reshape(batch, kv_heads, -1, head_size)
    scores = (
        torch.matmul(rows, call.key.float().transpose(2, 3)).view(batch, heads, queries, keys)
        * call.scale
    )
    if call.soft_cap is not None:
        scores = torch.tanh(scores / call.soft_cap) * call.soft_cap
    scores = scores + added
    if call.sinks is not None:
        sinks = call.sinks.float()
        if sinks.dim() != 4:  # of the layer
            sinks = sinks.view(1, heads, 1, 1).expand(batch, heads, queries, 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)


def _attend_by_query_bias(call: Call, rows: torch.Tensor) -> torch.Tensor:
    batch, heads, queries, _ = call.query.shape
    cache, ratio = token_pages(call.key, call.value)
    spec = call.spec(block_size=1, mask_kind=MaskKind.QUERY_BIAS)
    layer, device = layer_for(call, spec), call.query.device
    tokens = torch.arange(queries, dtype=torch.int32, device=device)
    lengths = [queries] * batch
    common = CommonAttentionMetadata.from_lengths(
        lengths, lengths, device=device, causal=False, query_bias=rows.contiguous()
    )
    common = common.replace(
        block_table_tensor=torch.arange(batch, dtype=torch.int32, device=device)[:, None] * ratio
        + tokens
    )
    metadata = builder_for(layer.backend, spec, device).build(0, common)
    out: torch.Tensor = layer(pack(call.query, None), None, None, cache, metadata)
    return out.view(batch, queries, heads, -1)


@without_autocast
def _attend_by_rows(call: Call, added: torch.Tensor) -> torch.Tensor:
    """Each row of the batch in blocks of queries, over the range of keys that a block sees."""
    (batch, heads, queries, _), keys = call.query.shape, call.key.shape[2]
    sinks, cap = call.sinks, call.soft_cap or 0.0
    params = AttentionParams(
        scale=call.scale,
        causal=False,
        logits_soft_cap=cap,
        sinks=None if sinks is None else sinks.float().reshape(heads),
    )
    out = call.query.new_empty(batch, queries, heads, call.value.shape[3])
    for row in range(batch):
        query, key, value = (x[row].transpose(0, 1) for x in (call.query, call.key, call.value))
        rows = QueryRows(query, keys - queries, keys, 0, False, added[row, 0])
        attend_rows(rows, KeySpan(key, value), params, out[row], None)
    return out


def _check_torch_is_allowed(call: Call, reason: str) -> None:
    """Refuse if the user requires another backend; else log once per module that torch is used."""
    spec, device, name = call.spec(block_size=1), call.query.device, layer_name(call.module)
    backend = get_attn_backend(spec, None, device)
    if backend.get_name() == "torch":
        return
    source = explain(spec, device).source
    if source != "auto":
        raise UnsupportedConfigError(
            f"{name}: {reason}, which only the torch backend computes, but {source} requires "
            f"{backend.get_name()}: choose 'torch' or 'auto'",
            backend=backend.get_name(),
        )
    if call.module not in _logged:
        _logged.add(call.module)
        logger.warning("%s: torch instead of %s: %s", name, backend.get_name(), reason)
