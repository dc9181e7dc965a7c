"""Step plans: reuse one layer's launches for the next; only tensor addresses change.

A plan is made for the first call of a kind over a batch. It finds the launches of the cache write
and of attention (`step_launches.py`), attaches the tensors of the batch, and then runs for every
layer: it reads the addresses of the layer's tensors and submits the kernels. Where an address is
not aligned, a launch hook of Triton is active, another device is current, or a kernel was never
launched before, the same kernels are launched by Triton, on tensors. Hooks of a single kernel
(`pre_run_hooks`) are read when a plan is made.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.backends.triton.step_launches import Batch, Call, StepLaunches, prepare_step
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.metadata.paged import PartTensors
from attnlib.ops.triton.append_kv import BoundAppend
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.launch.bound import ALIGNMENT
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.sequence import (
    KEY_CACHE,
    LSE,
    OUT,
    QUERY,
    VALUE,
    VALUE_CACHE,
)
from attnlib.ops.triton.launch.signature import batch_signature, length_class
from attnlib.spec import AttentionSpec

__all__ = ["TritonPlan"]


class TritonPlan:
    """The launches of one kind of call over one batch.

    Args:
        impl: of the first layer that makes such a call.
        signature: of the call.
        query, key, value, cache, output, lse: of the call, per head.
        metadata: the batch.
        kernels: "auto", "hopper" or "portable".

    Raises:
        ContractError: tensors that the kernels cannot address.
    """

    takes_batches: ClassVar[bool] = True
    """`run` also takes a contiguous query and output with a batch dimension, `[B, T / B, H, D]`."""

    direct: Callable[..., bool] | None
    """`direct(query, key_cache, value_cache, output, lse, key, value)` does what `run` does, and
    reads nothing but the addresses of the tensors. It returns False and does nothing where `run`
    is needed. None where a layer has other tensors, or before the first launch by Triton."""

    def __init__(
        self,
        impl: AttentionImpl,
        signature: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: PagedKVCache,
        metadata: TritonMetadata,
        output: Tensor,
        lse: Tensor | None,
        kernels: str,
    ) -> None:
        self._spec = impl.spec
        self._signature = signature
        self._metadata = weakref.ref(metadata)  # the batch owns its plans
        self._split = metadata.num_decode_tokens if metadata.num_prefills else 0
        batch = _batch_tensors(metadata)
        call = Call(query, key, value, cache.key_cache, cache.value_cache, output, lse)
        self._launches = launches = _find_launches(
            impl, signature, call, cache, metadata, batch, kernels
        )
        need, (decodes, prefills, slots) = launches.workspace_bytes, batch
        if need and decodes is not None:
            space = decodes.workspace
            if space is None or space.nbytes < need:  # q has more rows than the batch has tokens
                space = torch.empty(need // 4, dtype=torch.float32, device=query.device)
                batch = Batch(decodes._replace(workspace=space), prefills, slots)
        if prefills is not None and launches.prefill is not None:
            batch = batch._replace(prefills=launches.prefill.with_scratch(prefills))
        self._batch = batch
        self._append: BoundAppend | None = None
        self._submit: Callable[..., bool] | None = None
        self.direct = None
        self._fallback: TritonPlan | None = None
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
            values = _values(impl, query, key, value, cache, output, lse)
            of_layer = self._launches.of_layer
            if self._submit(*values[: VALUE + 1], *(values[n] for n in of_layer)):
                return
        if self._append is not None and key is not None and value is not None:
            self._append.run(key, value, cache.key_cache, cache.value_cache)
            key = value = None
        self._run_by_triton(impl, query, key, value, cache, output, lse)

    @property
    def is_bound(self) -> bool:
        """Whether the direct launches are bound, so that `bind_call` need not be tried again."""
        return self._submit is not None

    def bind_call(
        self, *like: Any, own: tuple[Tensor | None, ...] = ()
    ) -> Callable[..., bool] | None:
        """See `StepPlan`. Further tensors in `like` must be at the same addresses in each call."""
        submit: Any = self._submit
        if submit is None or len(own) != len(self._launches.of_layer):  # scales that are tensors
            return None
        count = VALUE + 1
        values = (*like[:count], *own, *like[count:])
        found: Callable[..., bool] | None = submit.compare(torch.is_grad_enabled, values)
        return found

    def appending(self, append: BoundAppend) -> TritonPlan:
        """A copy of this plan of a call without keys: its `run` takes keys and values, `[R, T, Hkv,
        D]`, and writes them by `append`."""
        plan = copy.copy(self)
        plan._append, plan._submit, plan.direct = append, None, None
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
        addresses = _addresses(launches, self._batch)
        if addresses is None:
            return
        # The launches hold addresses: keep the memory behind them, even if a tensor is resized.
        kept = [self._batch.slots, *(append.batch if append else ())]
        for part in self._batch[:2]:
            if part is not None:
                kept += part[:7]  # the other fields are numbers
                kept += part.score_tensors
        self._storages = [x.untyped_storage() for x in kept if x is not None]
        self._submit = template.bind(addresses)
        self.direct = None if launches.of_layer else self._submit

    def _run_by_triton(
        self, impl: AttentionImpl, query: Tensor, key: Tensor | None, value: Tensor | None,
        cache: PagedKVCache, output: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        """The same kernels launched by Triton; plain kernels where addresses are not aligned and
        the prepared ones need alignment."""
        spec, launches = self._spec, self._launches
        q_and_caches = (
            query.data_ptr()
            | output.data_ptr()
            | cache.key_cache.data_ptr()
            | cache.value_cache.data_ptr()
        )
        aligned = not q_and_caches & ALIGNMENT and launches.rows_aligned
        if not aligned and launches.needs_alignment:
            if spec.batch_invariant:
                raise ContractError(
                    "query, output and caches of a layer with batch_invariant=True must start on "
                    "16-byte boundaries: other kernels would give other bits; copy them, or "
                    'configure the backend with kernels="portable"',
                    rule="M15",
                )
            self._plain(impl, query, key, value, cache, output, lse).run(
                impl, query, key, value, cache, output, lse
            )
            return
        query, key, value, output = _per_head(spec, query, key, value, output)
        decodes, prefills, slots = self._batch
        write, split = launches.write, self._split
        # Scratch memory that is not aligned needs other kernels as well.
        all_aligned = aligned and _addresses(launches, self._batch) is not None
        with chips.device_guard(query):
            values = list(_values(impl, query, key, value, cache, output, lse))
            if write is not None and key is not None and value is not None:
                new = key.data_ptr() | value.data_ptr()
                write_aligned = not (q_and_caches | new) & ALIGNMENT
                given = _with_bytes(values) if write.as_bytes else values
                write.launches(False, write_aligned).run(0, given, (slots,))
            if launches.as_bytes:
                values = _with_bytes(values)
            for bound, of_prefill in launches.attention(False, all_aligned):
                prepared, batch = (
                    (launches.prefill, prefills) if of_prefill else (launches.decode, decodes)
                )
                assert prepared is not None and batch is not None
                if split:
                    rows = slice(split, None) if of_prefill else slice(None, split)
                    for source in (QUERY, OUT, LSE):
                        x = (query, None, None, output, lse)[source]
                        values[source] = None if x is None else x[rows]
                bound.run(0, values, prepared.tensors(batch))
        if self._submit is None:
            self._bind()

    def _plain(
        self, impl: AttentionImpl, query: Tensor, key: Tensor | None, value: Tensor | None,
        cache: PagedKVCache, output: Tensor, lse: Tensor | None,
    ) -> TritonPlan:  # fmt: skip
        """The plan of the same calls with the plain kernels only."""
        if self._fallback is None:
            metadata = self._metadata()
            assert metadata is not None  # the caller holds the batch
            query, key, value, output = _per_head(self._spec, query, key, value, output)
            self._fallback = TritonPlan(
                impl, self._signature, query, key, value, cache, metadata, output, lse, "portable"
            )  # fmt: skip
        return self._fallback


def _addresses(launches: StepLaunches, batch: Batch) -> tuple[Any, ...] | None:
    """The values of a batch for `launches.template`; None if its scratch memory is not aligned."""
    slots = batch.slots
    values: tuple[Any, ...] = () if launches.write is None or slots is None else (slots.data_ptr(),)
    for part, tensors in ((launches.decode, batch.decodes), (launches.prefill, batch.prefills)):
        if part is not None and tensors is not None:
            found = part.addresses(tensors)
            if found is None:
                return None
            values += found
    return values


def _values(
    impl: AttentionImpl, query: Tensor, key: Tensor | None, value: Tensor | None,
    cache: PagedKVCache, output: Tensor, lse: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The values of a call, in the order of `launch.sequence`."""
    return (
        query, cache.key_cache, cache.value_cache, output, lse, key, value,
        *impl.per_head_tensors, cache.k_scale, cache.v_scale, *impl.layer_score_tensors,
    )  # fmt: skip


def _with_bytes(values: list[Any]) -> list[Any]:
    """The values of a call with caches of float8 as bytes."""
    changed = list(values)
    for source in (KEY_CACHE, VALUE_CACHE):
        changed[source] = values[source].view(torch.uint8)
    return changed


def _per_head(
    spec: AttentionSpec, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Flat or per-head tensors as per-head views."""
    return (
        query.view(-1, spec.num_heads, spec.head_size),
        None if key is None else key.view(-1, spec.num_kv_heads, spec.head_size),
        None if value is None else value.view(-1, spec.num_kv_heads, spec.head_size_v),
        output.view(-1, spec.num_heads, spec.head_size_v),
    )


def _batch_tensors(metadata: TritonMetadata) -> Batch:
    """The tensors of a batch; an empty batch is one prefill."""
    slots, decode_len = metadata.slot_mapping, metadata.max_decode_query_len
    if metadata.num_prefills == 0 and metadata.num_decodes:
        return Batch(_part_tensors(metadata, metadata, decode_len), None, slots)
    if metadata.num_decodes == 0:
        return Batch(None, _part_tensors(metadata, metadata, metadata.max_query_len), slots)
    decode, prefill = (metadata.part_tensors(is_decode=is_decode) for is_decode in (True, False))
    return Batch(
        _part_tensors(metadata, decode, decode_len),
        _part_tensors(metadata, prefill, metadata.max_query_len),
        slots,
    )


def _part_tensors(
    metadata: TritonMetadata, part: TritonMetadata | PartTensors, max_query_len: int
) -> BatchTensors:
    """The tensors of a part of the batch, or of the whole batch."""
    flags = part.causal if isinstance(part.causal, Tensor) else None
    score = part.score_tensors
    return BatchTensors(
        part.query_start_loc, part.seq_lens, part.block_table, flags, part.query_bias,
        metadata.workspace, metadata.counters, metadata.max_seq_len,
        tuple(score.values()) if score else (), max_query_len,
    )  # fmt: skip


def _find_launches(
    impl: AttentionImpl,
    signature: Any,
    call: Call,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    batch: Batch,
    kernels: str,
) -> StepLaunches:
    """The launches of a call signature over batches like this one: from the launch cache, or
    prepared."""
    decodes, prefills, slots = batch
    causal, limits = metadata.causal, metadata.scheduler.limits
    schedule = concurrent = None
    if decodes is not None:
        schedule = metadata.decode_schedule
        if kernels == "portable":
            schedule = schedule._replace(uses_hopper=False)
        elif prefills is not None:
            concurrent = metadata.concurrent_schedule
    own = (signature, kernels, causal if isinstance(causal, bool) else None)
    key = (
        "step", own, metadata.num_decodes, metadata.num_decode_tokens, schedule, concurrent,
        None if decodes is None else batch_signature(decodes),
        None if prefills is None else (
            batch_signature(prefills), metadata.max_query_len,
            length_class(prefills, call.key_cache),
        ),
        None if slots is None else (slots.dtype, slots.shape, slots.stride()),
    )  # fmt: skip
    found: StepLaunches | None = LAUNCHES.get(key)
    if found is not None and (found.limits is limits or found.limits == limits):
        return found
    return prepare_step(impl, own, key, call, cache, metadata, batch, schedule, concurrent, kernels)
