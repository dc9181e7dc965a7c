"""Step plans: reuse one layer's launches for the next; only tensor addresses change.

A plan is made for the first call of a kind over a batch. It finds the launches of the cache write
and of attention (`launches.py`), attaches the tensors of the batch, and then runs for every
layer: it reads the addresses of the layer's tensors and submits the kernels. Where an address is
not aligned, a launch hook of Triton is active, another device is current, or a kernel was never
launched before, the same kernels are launched by Triton, on tensors. Hooks of a single kernel
(`pre_run_hooks`) are read when a plan is made.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton.launches import LayerCall, StepLaunches
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.backends.triton.plain_calls import PlainCalls
from attnlib.backends.triton.prepare import Step, prepare_step
from attnlib.cache.storage import PagedKVCache
from attnlib.kv_rotation import KVRotation
from attnlib.ops.triton.append_kv import BoundAppend
from attnlib.ops.triton.batch_tensors import Batch, BatchTensors
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.sequence import VALUE

__all__ = ["TritonPlan", "batch_of", "find_step", "make_plan"]


class TritonPlan:
    """The launches of one kind of call over one batch.

    Args:
        impl: of the first layer that makes such a call.
        signature: of the call.
        call: its tensors, per head.
        metadata: the batch.
        kernels: "auto", "hopper" or "portable".
        rotation: of the cache, where the kernels rotate queries and outputs (P15); else None.

    Attributes:
        rotated: what they rotate.

    Raises:
        ContractError: tensors that the kernels cannot address.
    """

    uncombined: ClassVar[bool] = False
    takes_batches: ClassVar[bool] = True
    """`run` also takes a contiguous query and output with a batch dimension, `[B, T / B, H, D]`."""

    direct: Callable[..., bool] | None
    """`direct(query, key_cache, value_cache, output, lse, key, value)` does what `run` does, and
    reads nothing but the addresses of the tensors. It returns False and does nothing where `run`
    is needed. None where a layer has other tensors, or before the first launch by Triton."""

    is_bound: bool  # whether `bind_call` gives its final answer

    def __init__(
        self,
        impl: AttentionImpl,
        signature: Any,
        call: LayerCall,
        metadata: TritonMetadata,
        kernels: str,
        rotation: KVRotation | None = None,
    ) -> None:
        self._spec = impl.spec
        self._signature = signature
        self._metadata = weakref.ref(metadata)  # the batch owns its plans
        self._split = metadata.num_decode_tokens if metadata.num_prefills else 0
        batch = batch_of(metadata, self.uncombined)
        step = (impl, signature, call, metadata, batch, kernels, rotation)
        launches = self._launches = find_step(*step)
        self.rotated = launches.rotated
        need, decodes = launches.workspace_bytes, batch.decodes
        if need and decodes is not None:
            space = decodes.workspace
            if space is None or space.nbytes < need:  # q has more rows than the batch has tokens
                space = torch.empty(need // 4, dtype=torch.float32, device=call.query.device)
                batch = batch._replace(decodes=decodes._replace(workspace=space))
        if batch.prefills is not None and launches.prefill is not None:
            batch = batch._replace(prefills=launches.prefill.with_scratch(batch.prefills))
        self._batch = batch
        self._append: BoundAppend | None = None
        self._submit: Callable[..., bool] | None = None
        self.direct, self.is_bound = None, False
        self._plain: PlainCalls | None = None
        self._storages: list[torch.UntypedStorage] = []
        self._bind()

    def run(
        self,
        impl: AttentionImpl,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: PagedKVCache,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """See `StepPlan.run`."""
        direct = self.direct
        if direct is not None:
            if direct(query, cache.key_cache, cache.value_cache, output, lse, key, value):
                return
        elif self._submit is not None:
            values = LayerCall(query, key, value, cache, output, lse).values(impl)
            of_layer = self._launches.of_layer
            if self._submit(*values[: VALUE + 1], *(values[n] for n in of_layer)):
                return
        if self._append is not None and key is not None and value is not None:
            self._append.run(key, value, cache.key_cache, cache.value_cache)
            key = value = None
        call = LayerCall(query, key, value, cache, output, lse).per_head(self._spec)
        if not self._launches.reads(call):
            if self._plain is None:
                self._plain = PlainCalls(self._spec, self.rotated)
            self._plain.run(impl, call, self._plain_plan)
            return
        self._launches.run_by_triton(call, impl, self._batch, self._split)
        if self._submit is None:
            self._bind()

    def _plain_plan(self, impl: AttentionImpl, call: LayerCall) -> TritonPlan:
        """The plan of the same calls with the plain kernels only, which read unaligned tensors."""
        metadata = self._metadata()
        assert metadata is not None  # the caller holds the batch
        return TritonPlan(impl, self._signature, call, metadata, "portable")

    def bind_call(
        self, *like: Any, own: tuple[Tensor | None, ...] = ()
    ) -> Callable[..., bool] | None:
        """See `StepPlan`. Further tensors in `like` must be at the same addresses in each call."""
        submit: Any = self._submit
        if submit is None or len(own) != len(self._launches.of_layer):  # scales that are tensors
            return None
        values = (*like[: VALUE + 1], *own, *like[VALUE + 1 :])
        found: Callable[..., bool] | None = submit.compare(torch.is_grad_enabled, values)
        return found

    def appending(self, append: BoundAppend) -> TritonPlan:
        """A copy of this plan of a call without keys: its `run` takes keys and values, `[R, T, Hkv,
        D]`, and writes them by `append`."""
        plan = copy.copy(self)
        plan._append, plan._submit, plan.direct, plan.is_bound = append, None, None, False
        plan._bind()
        return plan

    def _bind(self) -> None:
        """Bind the direct launches, if every kernel has been launched by Triton before."""
        launches, append = self._launches, self._append
        template = launches.template
        if append is not None:
            template = launches.make_template(append.bind()) if append.is_direct else None
        elif template is None:
            template = launches.template = launches.make_template()
        if template is None or any(launches.hooks):
            return
        batch, slots = self._batch, self._batch.slots if launches.write is not None else None
        addresses: tuple[Any, ...] = () if slots is None else (slots.data_ptr(),)
        for part, tensors in ((launches.decode, batch.decodes), (launches.prefill, batch.prefills)):
            if part is not None and tensors is not None:
                found = part.addresses(tensors)
                if found is None:  # scratch memory that is not aligned
                    return
                addresses += found
        # The launches hold addresses: keep the memory behind them, even if a tensor is resized.
        self._storages = batch.storages()
        if append is not None:
            self._storages += [x.untyped_storage() for x in append.batch if x is not None]
        self._submit = template.bind(addresses)
        self.direct, self.is_bound = None if launches.of_layer else self._submit, True


def make_plan(
    self: Any,  # a `TritonImpl`, whose method this is
    signature: Hashable,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    output: Tensor,
    lse: Tensor | None,
) -> TritonPlan | None:
    """See `AttentionImpl.plan`. Calls without query rows have no launches and no plan; those that
    write an open format have its own functions to call (P16)."""
    if query.shape[0] == 0 or not cache.key_cache.shape[0]:
        return None
    if key is not None and self.spec.has_open_format:
        return None
    call = LayerCall(query, key, value, cache, output, lse)
    return TritonPlan(self, signature, call, metadata, self._kernels)


def batch_of(metadata: TritonMetadata, uncombined: bool = False) -> Batch:
    """The tensors of a batch; an empty batch is one prefill. See `BatchTensors.uncombined`."""
    decodes = prefills = None
    is_mixed = metadata.num_decodes and metadata.num_prefills
    shared = (metadata.workspace, metadata.counters, metadata.max_seq_len)
    if metadata.num_decodes:
        part = metadata.part_tensors(is_decode=True) if is_mixed else metadata
        decodes = BatchTensors.of_part(part, *shared, metadata.max_decode_query_len)
        decodes = decodes._replace(early=metadata.early, uncombined=uncombined)
    if metadata.num_prefills or decodes is None:
        part = metadata.part_tensors(is_decode=False) if is_mixed else metadata
        prefills = BatchTensors.of_part(part, *shared, metadata.max_query_len)
    return Batch(decodes, prefills, metadata.slot_mapping)


def find_step(
    impl: AttentionImpl,
    signature: Hashable,
    call: LayerCall,
    metadata: TritonMetadata,
    batch: Batch,
    kernels: str,
    rotation: KVRotation | None,
) -> StepLaunches:
    """The launches of a call signature over batches like this one: from the launch cache, or
    prepared."""
    decodes, prefills, slots = batch
    causal, limits = metadata.causal, metadata.scheduler.limits
    schedule = concurrent = decode_form = prefill_form = None
    if decodes is not None:
        schedule, decode_form = metadata.decode_schedule, decodes.form()
        if kernels == "portable":
            schedule = schedule._replace(uses_hopper=False)
        elif prefills is not None:
            concurrent = metadata.concurrent_schedule
    if prefills is not None:
        lengths = prefills.max_query_len, prefills.length_class(call.cache.key_cache)
        prefill_form = (prefills.form(), *lengths)
    own = (signature, kernels, causal if isinstance(causal, bool) else None, rotation)
    parts = (schedule, concurrent, decode_form, prefill_form)
    written = None if slots is None else (slots.dtype, slots.shape, slots.stride())
    key = ("step", own, metadata.num_decodes, metadata.num_decode_tokens, parts, written)
    found: StepLaunches | None = LAUNCHES.get(key)
    if found is not None and (found.limits is limits or found.limits == limits):
        return found
    step = Step(impl, own, call, metadata, batch, kernels, schedule, concurrent, rotation)
    kept: StepLaunches = LAUNCHES.keep(key, prepare_step(step))
    return kept
