"""Plans of a layer's calls: found by the call signature, or prepared after all checks; and their
run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from attnlib.backends.step_plan import StepPlan
from attnlib.cache.storage import UNIT_SCALE, PagedKVCache
from attnlib.instrumentation import ENVIRONMENT, OBSERVERS, VALIDATE_KEY, checker_for_level
from attnlib.layer.cache_checks import check_cache_type, check_latent_scales
from attnlib.layer.call import ExtraKeys, LayerCall, RecentPlan, call_signature, new_lse, notify
from attnlib.layer.checks import check_call, check_output, refuse_gradients
from attnlib.layer.metadata_checks import (
    check_addresses,
    check_extra_keys,
    check_extra_values,
    check_metadata_type,
)
from attnlib.layer.method_plan import MethodPlan
from attnlib.layer.per_head import own_tensors, per_head_signature
from attnlib.layer.scales import agree_on_scales, calculate_scales
from attnlib.layer.tensor_checks import check_output_memory, check_return_lse, check_tensor_types
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.paged import PagedMetadata
from attnlib.ops.checks import check_writable
from attnlib.ops.signature import tensor_check
from attnlib.score_functions.query_tensors import QueryTensors

if TYPE_CHECKING:
    from attnlib.layer.attention import Attention

__all__ = ["FoundPlan", "find_plan", "run_plan", "scales_agree"]

_GIVEN_OR_NOT = (torch.Tensor, type(None))
MAX_PLANS = 64
"""Step plans that one batch keeps; beyond it they are dropped and made again on demand."""


FoundPlan = tuple[StepPlan, tuple[int, ...] | None]
"""The plan of a call, and the shape of an output to allocate (None: like the query)."""


def find_plan(layer: Attention, call: LayerCall) -> FoundPlan:
    """The plan of a call: that of its signature, or a new one after all checks.

    Raises:
        ContractError, LayoutMismatchError: as `Attention.forward`.
    """
    cache, metadata, extra = call.cache, call.metadata, call.extra
    if cache is not None and not isinstance(cache, PagedKVCache):
        check_cache_type(cache)  # raises
    if not isinstance(metadata, AttentionMetadata):
        check_metadata_type(layer, metadata)  # raises
    if call.return_lse is not False and call.return_lse is not True:
        check_return_lse(call.return_lse)
    if extra is not None and not isinstance(extra, ExtraKeys):
        check_extra_keys(layer.spec, call)  # raises
    query, others = call.query, (call.key, call.value, call.output)
    for given in (query, *others):
        if not isinstance(given, _GIVEN_OR_NOT) or query is None:
            check_tensor_types(query, *others)  # raises
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        more = (*extra.tensors.values(), extra.sinks) if isinstance(extra, QueryTensors) else ()
        refuse_gradients(query, call.key, call.value, *more)
    signature = call_signature(layer, call)
    known: FoundPlan | None = metadata.plans.get(signature)
    if known is None or not scales_agree(layer, cache):
        return _prepare(layer, signature, call)
    if extra is not None:
        check_extra_values(layer.spec, call)
    if call.output is not None and call.output.is_inference():
        if not torch.is_inference_mode_enabled():
            check_writable(output=call.output)
    if cache is not None and extra is None:
        layer._memory.tensor_check = (), None  # it may have failed
        remember(layer, signature, *known, call)
    return known


def scales_agree(layer: Attention, cache: PagedKVCache | None) -> bool:
    """Whether a layer has no scales of its own, or those of the cache, by identity."""
    k_scale, v_scale = layer.k_scale, layer.v_scale
    if cache is None or (k_scale is UNIT_SCALE and v_scale is UNIT_SCALE):
        return True
    return k_scale is cache.k_scale and v_scale is cache.v_scale


def remember(
    layer: Attention,
    signature: tuple[Any, ...],
    plan: StepPlan,
    shape: tuple[int, ...] | None,
    call: LayerCall,
) -> None:
    """Let `call_layer` recognize the next call of this kind, by C functions.

    Args:
        layer: of the call.
        signature, plan, shape: of the call; `shape` is that of an output to allocate, None for one
            like the query.
        call: without selected keys and entries, over a cache.
    """
    query, key, value, cache, metadata, output, return_lse, _ = call
    assert cache is not None
    views = cache.key_cache, cache.value_cache
    bind, out = getattr(plan, "bind_call", None), ... if output is None else output
    own = own_tensors(layer) if layer._has_per_head else ()
    bound = bind and bind(query, *views, out, ..., key, value, own=own)
    compared, check = layer._memory.tensor_check
    if compared != signature:
        check = None
        if key is not None and value is not None:
            check = tensor_check(query, key, value, *views, *(() if output is None else (output,)))
        layer._memory.tensor_check = signature, check
    if check is None and bound is None:
        return
    heads = per_head_signature(layer) if layer._has_per_head else None
    kind = (signature[0], signature[1], return_lse, output is None)
    metadata.__dict__["recent_plan"] = RecentPlan(*kind, check, heads, shape, plan, bound)


def run_plan(
    layer: Attention,
    plan: StepPlan,
    call: LayerCall,
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Run the plan of a call, between the check of its values that ATTNLIB_VALIDATE asks for and
    the observers.

    Args:
        layer, plan, call: a call and its plan.
        output, lse: where to write.
    """
    query, key, value, cache, metadata, _, _, extra = call
    finish = None
    if VALIDATE_KEY in ENVIRONMENT and (checker := checker_for_level()) is not None:
        check_output_memory(query, cache, output)
        finish = checker(layer, query, key, value, cache, metadata, extra=extra)
    run: Any = plan.run  # that of `MethodPlan` takes one more argument
    run(layer.impl, query, key, value, cache, output, lse, *(() if extra is None else (extra,)))
    if finish is not None:
        finish()
    if OBSERVERS:
        notify(layer, call, output, lse)


def _prepare(layer: Attention, signature: tuple[Any, ...], call: LayerCall) -> FoundPlan:
    """Check a call and prepare its plan, once per batch and call signature."""
    spec, cache, metadata = layer.spec, call.cache, call.metadata
    heads, shape = _check(layer, signature, call)
    calculates_scales = metadata.enable_kv_scales_calculation
    if calculates_scales and cache is not None:
        calculate_scales(layer, heads.key, heads.value, cache, metadata.slot_mapping)
    if cache is not None and not scales_agree(layer, cache):
        agree_on_scales(layer, cache)  # may change the scales of the cache
        signature = call_signature(layer, call)
    if cache is not None and spec.use_mla:
        check_latent_scales(spec, cache)
    plan = _plan(layer, signature, heads)
    known = plan, shape
    if not calculates_scales:  # every layer computes its own
        plans = metadata.plans
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plans[signature] = known
        if cache is not None and call.extra is None and getattr(plan, "is_bound", False):
            remember(layer, signature, *known, call)
    return known


def _check(
    layer: Attention, signature: tuple[Any, ...], call: LayerCall
) -> tuple[LayerCall, tuple[int, ...] | None]:
    """All checks of a call, of which those of shapes are made once per kind of call and batch.

    Returns:
        The call per head, and the shape of an output to allocate (None: like the query).
    """
    spec, metadata, heads = layer.spec, call.metadata, call
    query, key, value, cache = call[:4]
    dims = (query.dim(), key is not None and key.dim(), value is not None and value.dim())
    if 2 in dims:
        heads = call.per_head(spec)
    facts = metadata if isinstance(metadata, PagedMetadata) else metadata.facts
    slots, lens = metadata.slot_mapping, facts.seq_lens
    given = (
        signature,
        type(metadata),
        facts.spec,
        facts.num_actual_tokens,
        None if slots is None else (slots.dtype, slots.shape, slots.device),
        None if lens is None else lens.device,
        metadata.enable_kv_scales_calculation,
    )
    accepted, shape = layer._memory.accepted
    if given != accepted:
        check_call(layer, heads)
        check_output(spec, call)
        shape = call.output_shape(spec)
        if query.shape == shape and query.is_contiguous():
            shape = None
        layer._memory.accepted = given, shape
    if call.extra is not None or spec.takes_extra:
        check_extra_keys(spec, call)
        if call.extra is not None:
            check_extra_values(spec, call)
    if call.output is not None:
        if call.output.is_inference() and not torch.is_inference_mode_enabled():
            check_writable(output=call.output)  # before keys are written
        inputs = (query,) if cache is None else (query, cache.key_cache, cache.value_cache)
        own = call.output.untyped_storage()
        begin, end = own.data_ptr(), own.data_ptr() + own.nbytes()
        for tensor in inputs:  # their bytes are compared only inside one allocation
            other = tensor.untyped_storage()
            if other.data_ptr() < end and begin < other.data_ptr() + other.nbytes():
                check_output_memory(query, cache, call.output)
                break
    if cache is not None and query.is_cpu:
        check_addresses(metadata, cache)
    return heads, shape


def _plan(layer: Attention, signature: tuple[Any, ...], heads: LayerCall) -> StepPlan:
    """The backend's plan, or one that calls the impl's methods.

    Args:
        layer: of the call.
        signature: of the call as it was given.
        heads: the call per head.
    """
    spec, (query, key, value, cache, metadata, output, return_lse, _) = layer.spec, heads
    writes = layer.writes and metadata.slot_mapping is not None
    if cache is not None and not spec.takes_extra and signature[0].has_plan:
        rows = (query.shape[0], spec.num_heads, spec.head_size_v)
        if output is None:  # a stand-in with the strides that the output will have
            output = torch.empty(rows, dtype=query.dtype, device=query.device)
        elif output.dim() == 2:
            output = output.view(rows)
        lse = new_lse(spec, query) if return_lse else None
        new = (key, value) if writes else (None, None)
        plan = layer.impl.plan(signature, query, *new, cache, metadata, output, lse)
        if plan is not None:
            return plan
    return MethodPlan(spec, metadata, writes)
