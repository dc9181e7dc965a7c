"""Plans of a layer's calls: found by the call signature, or prepared after all checks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from attnlib.backends.attention_impl import AttentionImpl
from attnlib.backends.base import AttentionBackend
from attnlib.backends.step_plan import StepPlan
from attnlib.cache.storage import UNIT_SCALE, PagedKVCache, Scale
from attnlib.errors import ContractError
from attnlib.instrumentation import VALIDATE_VARIABLE, checker_for_level
from attnlib.layer.call_plans import MAX_PLANS, CheckedPlan, MethodPlan, RecentPlan
from attnlib.layer.checks import check_cache_type, check_call, check_latent_scales, per_head
from attnlib.layer.metadata_checks import ExtraKeys, check_addresses, check_extra_keys
from attnlib.layer.scales import agree_on_scales
from attnlib.ops.signature import tensor_check, tensor_signature
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["PlannedLayer"]


class PlannedLayer(nn.Module):
    """The part of `attnlib.layer.Attention` that finds or prepares the plan of a call."""

    spec: AttentionSpec
    backend: type[AttentionBackend]
    impl: AttentionImpl
    k_scale: Scale
    v_scale: Scale
    prefix: str
    writes: bool
    _has_per_head: bool
    _accepted: tuple[Any, ...]
    _tensor_check: tuple[Any, Any]

    def calc_kv_scales(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `Attention.calc_kv_scales`."""
        raise NotImplementedError

    def _find_plan(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        output: torch.Tensor | None,
        return_lse: bool,
        extra: ExtraKeys | None = None,
    ) -> tuple[StepPlan, tuple[int, ...] | None]:
        """The plan of a call and the shape of an output to allocate (None: like the query).

        `extra` are the selected keys or the compressed entries of the call.
        """
        if cache is not None and not isinstance(cache, PagedKVCache):
            check_cache_type(cache)  # raises
        signature = self._call_signature(query, key, value, cache, output, return_lse)
        if extra is not None:
            if not isinstance(extra, ExtraKeys):
                check_extra_keys(self.spec, query, metadata, extra)  # raises
            signature = (*signature, extra.signature)
        plans = getattr(metadata, "plans", None)
        known: tuple[StepPlan, tuple[int, ...] | None] | None
        known = None if plans is None else plans.get(signature)
        if known is None or not self._scales_agree(cache):
            known = self._prepare(
                signature, query, key, value, cache, metadata, output, return_lse, extra
            )
        elif cache is not None and extra is None:
            self.__dict__["_tensor_check"] = (), None  # it may have failed
            self._remember(signature, known, query, key, value, metadata, output, return_lse)
        return known

    def _remember(
        self,
        signature: tuple[Any, ...],
        known: tuple[StepPlan, tuple[int, ...] | None],
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: Any,
        output: torch.Tensor | None,
        return_lse: bool,
    ) -> None:
        """Let `__call__` recognize the next call of this kind, by C functions. Nothing where
        `nn.Module` would not call `forward` of the class: it was replaced on this instance, or the
        module is compiled."""
        state = self.__dict__
        if "forward" in state or self._compiled_call_impl is not None:
            return
        plan, shape = known
        bind, out = getattr(plan, "bind_call", None), ... if output is None else output
        own = self._own_tensors() if self._has_per_head else ()
        call = bind and bind(query, ..., ..., out, ..., key, value, own=own)
        compared, check = self._tensor_check
        if compared != signature:
            check = None
            if key is not None and value is not None:
                tensors = (query, key, value) if output is None else (query, key, value, output)
                check = tensor_check(*tensors)
            state["_tensor_check"] = signature, check  # `nn.Module` assigns slowly
        if check is None and call is None:
            return
        metadata.__dict__["recent_plan"] = RecentPlan(
            signature[0], signature[1], return_lse, output is None, check,
            self._per_head_signature() if self._has_per_head else None, shape, plan.run, call,
        )  # fmt: skip

    def _call_signature(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        output: torch.Tensor | None,
        return_lse: bool,
    ) -> tuple[Any, ...]:
        """The one key of a call: everything that checks and launches follow from, besides the batch
        and addresses. Tensors may be flat or per head."""
        impl = self.impl
        return (
            impl._group or impl.group,
            None if cache is None else cache._signature or cache.signature,
            query.dtype, query.shape, query.stride(), query.device, query.requires_grad,
            None if key is None else (key.dtype, key.shape, key.stride(), key.device),
            None if value is None else (value.dtype, value.shape, value.stride(), value.device),
            None if output is None
            else (output.dtype, output.shape, output.stride(), output.device),
            return_lse, torch.is_grad_enabled(),
            self._per_head_signature() if self._has_per_head else None,
        )  # fmt: skip

    def _own_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors of the layer that kernels read: slopes and sinks, if the spec has either,
        then score tensors."""
        spec, impl = self.spec, self.impl
        per_head = impl.per_head_tensors if spec.has_alibi or spec.has_sink else ()
        return (*per_head, *impl.layer_score_tensors)

    def _per_head_signature(self) -> tuple[Any, ...]:
        return tuple(
            None if tensor is None else tensor_signature(tensor)
            for tensor in (*self.impl.per_head_tensors, *self.impl.layer_score_tensors)
        )

    def _prepare(
        self,
        signature: tuple[Any, ...],
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        output: torch.Tensor | None,
        return_lse: bool,
        extra: ExtraKeys | None,
    ) -> tuple[StepPlan, tuple[int, ...] | None]:
        """Check a call and prepare its plan, once per batch and call signature.

        Returns:
            The plan, and the shape of an output to allocate (None: like the query).
        """
        spec = self.spec
        if torch.is_grad_enabled():
            _refuse_gradients(query, key, value)
        q, k, v = query, key, value
        if query.dim() == 2:
            q = per_head("query", query, spec.num_heads, spec.head_size)
        if key is not None and key.dim() == 2:
            k = per_head("key", key, spec.num_kv_heads, spec.head_size)
        if value is not None and value.dim() == 2:
            v = per_head("value", value, spec.num_kv_heads, spec.head_size_v)
        shape = self._output_shape(query)
        slots = getattr(metadata, "slot_mapping", None)
        accepted = (
            signature, type(metadata), getattr(metadata, "spec", None),
            getattr(metadata, "num_actual_tokens", None),
            None if slots is None else (slots.dtype, slots.shape, slots.device),
            getattr(getattr(metadata, "seq_lens", None), "device", None),
        )  # fmt: skip
        if accepted != self._accepted:
            check_call(self, q, k, v, cache, metadata, return_lse)
            self._check_output(query, output, shape)
            self._accepted = accepted
        if (
            extra is not None
            or spec.key_selection is not None
            or spec.compressed_entries is not None
        ):
            check_extra_keys(spec, query, metadata, extra)
        if cache is not None and query.is_cpu:
            check_addresses(metadata, cache)
        calculates_scales = getattr(metadata, "enable_kv_scales_calculation", False)
        if calculates_scales and cache is not None and k is not None and v is not None:
            self._calculate_scales(k, v, cache, metadata.slot_mapping)
        if cache is not None and not self._scales_agree(cache):
            agree_on_scales(self, cache)  # may change the scales of the cache
            signature = self._call_signature(query, key, value, cache, output, return_lse)
            if extra is not None:
                signature = (*signature, extra.signature)
        if cache is not None and spec.use_mla:
            check_latent_scales(spec, cache)
        heads = (query.shape[0], spec.num_heads, spec.head_size_v)
        if output is None:  # a stand-in with the strides that the output will have
            out = torch.empty(heads, dtype=query.dtype, device=query.device)
        else:
            out = output.view(heads) if output.dim() == 2 else output
        plan = self._plan(signature, q, k, v, cache, metadata, out, return_lse)
        like_query = query.shape == shape and query.is_contiguous()
        known = (plan, None if like_query else shape)
        plans = getattr(metadata, "plans", None)
        if plans is not None and not calculates_scales:  # every layer computes its own
            if len(plans) >= MAX_PLANS:
                plans.clear()
            plans[signature] = known
            if cache is not None and extra is None and getattr(plan, "is_bound", False):
                self._remember(signature, known, query, key, value, metadata, output, return_lse)
        return known

    def _calculate_scales(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slots: torch.Tensor | None,
    ) -> None:
        """Scales from the keys and values that this step writes, once: a layer or a cache that has
        scales keeps them, because they hold for everything the cache stores."""
        unset = all(isinstance(s, float) and s == 1.0 for s in (cache.k_scale, cache.v_scale))
        if slots is None or not (self.writes and self._uses_cache_scales and unset):
            return
        if key.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ContractError(
                "enable_kv_scales_calculation computes new scales, which a CUDA graph would "
                "compute at each replay: run one step without a graph first",
                rule="M9",
            )
        unwritten = (slots < 0)[:, None, None]
        rows = slots.shape[0]
        new = (tensor[:rows].masked_fill(unwritten, 0) for tensor in (key, value))
        self.calc_kv_scales(key, *new)

    def _plan(
        self,
        signature: tuple[Any, ...],
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: Any,
        output: torch.Tensor,
        return_lse: bool,
    ) -> StepPlan:
        """The backend's plan, or one that calls the impl's methods; checked where a debugging level
        asks for it. Tensors are per head."""
        plan: StepPlan | None = None
        writes = self.writes and metadata.slot_mapping is not None
        spec = self.spec
        takes_plans = spec.key_selection is None and spec.compressed_entries is None
        if cache is not None and takes_plans and signature[0].has_plan:
            lse = None
            if return_lse:
                rows = (query.shape[0], self.spec.num_heads)
                lse = torch.empty(rows, dtype=torch.float32, device=query.device)
            new = (key, value) if writes else (None, None)
            plan = self.impl.plan(signature, query, *new, cache, metadata, output, lse)
        if plan is None:
            plan = MethodPlan(self.spec, metadata, writes)
        if VALIDATE_VARIABLE in os.environ and (checker := checker_for_level()) is not None:
            return CheckedPlan(plan, cast("Attention", self), metadata, checker)
        return plan

    def _output_shape(self, query: torch.Tensor) -> tuple[int, ...]:
        spec = self.spec
        if query.dim() == 2:
            return (query.shape[0], spec.num_heads * spec.head_size_v)
        return (query.shape[0], spec.num_heads, spec.head_size_v)

    def _check_output(
        self, query: torch.Tensor, output: torch.Tensor | None, shape: tuple[int, ...]
    ) -> None:
        if output is None:
            return
        spec = self.spec
        if output.shape not in (shape, (query.shape[0], spec.num_heads, spec.head_size_v)):
            raise ContractError(
                f"output has shape {tuple(output.shape)}; it must be {list(shape)}", rule="P9"
            )
        if output.dtype != query.dtype or output.device != query.device or output.stride(-1) != 1:
            raise ContractError(
                f"output is {output.dtype} on {output.device} with last stride "
                f"{output.stride(-1)}; it must be {query.dtype} on {query.device} with last "
                "stride 1",
                rule="P9",
            )

    def _scales_agree(self, cache: PagedKVCache | None) -> bool:
        """Whether this layer's KV scales are those of the cache, by identity."""
        k_scale, v_scale = self.k_scale, self.v_scale
        if cache is None or (k_scale is UNIT_SCALE and v_scale is UNIT_SCALE):
            return True
        return k_scale is cache.k_scale and v_scale is cache.v_scale

    @property
    def _uses_cache_scales(self) -> bool:
        return self.k_scale is UNIT_SCALE and self.v_scale is UNIT_SCALE


def _refuse_gradients(*tensors: torch.Tensor | None) -> None:
    if any(t is not None and t.requires_grad for t in tensors):
        raise ContractError(
            "query, key or value requires a gradient, and attnlib computes no gradients: run the "
            "model under torch.inference_mode() or torch.no_grad()"
        )
