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
from attnlib.backends.triton.find_step import batch_of, find_step
from attnlib.backends.triton.launches import LayerCall
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.kv_rotation import KVRotation
from attnlib.ops.triton.append_kv import BoundAppend
from attnlib.ops.triton.launch.sequence import VALUE

__all__ = ["TritonPlan", "make_plan", "make_rotating_plan"]

_DECODES_ROTATE = _PREFILLS_ROTATE = False
"""Whether decodes rotate queries and outputs in their kernels, and prefills over copies of the
cache rotate these; not measured yet."""


class TritonPlan:
    """The launches of one kind of call over one batch.

    Args:
        impl: of the first layer that makes such a call.
        signature: of the call.
        call: its tensors, per head.
        metadata: the batch.
        kernels: "auto", "hopper" or "portable".
        rotation: of the heads of the cache, where the kernels may rotate queries and outputs
            (P15); `rotates` says whether they do.

    Raises:
        ContractError: tensors that the kernels cannot address.
    """

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
        batch = batch_of(metadata)
        step = (impl, signature, call, metadata, batch, kernels, rotation)
        launches = self._launches = find_step(*step)
        self._rotation = rotation if launches.rotates else None
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
        self._plain: TritonPlan | None = None
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
            self._run_plain(impl, call)
            return
        self._launches.run_by_triton(call, impl, self._batch, self._split)
        if self._submit is None:
            self._bind()

    @property
    def rotates(self) -> bool:
        """Whether the kernels rotate queries, and outputs back (P15)."""
        return self._rotation is not None

    def _run_plain(self, impl: AttentionImpl, call: LayerCall) -> None:
        """Run the plan of the plain kernels, which read unaligned tensors and rotate nothing."""
        rotation, query, output = self._rotation, call.query, call.out
        if rotation is not None and rotation.keys:
            call = call._replace(query=impl.rotate_heads(query, rotation.seed))
        self._plain_plan(impl, call).run(impl, *call)
        if rotation is not None and rotation.values:
            impl.rotate_heads(output, rotation.seed, inverse=True, out=output)

    def _plain_plan(self, impl: AttentionImpl, call: LayerCall) -> TritonPlan:
        """The plan of the same calls with the plain kernels only.

        Raises:
            ContractError: a batch-invariant layer, whose bits depend on the kernel (M15).
        """
        if self._spec.batch_invariant:
            raise ContractError(
                "query, output and caches of a layer with batch_invariant=True must start on "
                "16-byte boundaries: other kernels would give other bits; copy them, or "
                'configure the backend with kernels="portable"',
                rule="M15",
            )
        if self._plain is None:
            metadata = self._metadata()
            assert metadata is not None  # the caller holds the batch
            self._plain = TritonPlan(impl, self._signature, call, metadata, "portable")
        return self._plain

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


def make_rotating_plan(
    self: Any,  # a `TritonImpl`, whose method this is
    rotation: KVRotation,
    signature: Hashable,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    output: Tensor,
    lse: Tensor | None,
) -> TritonPlan | None:
    """See `AttentionImpl.rotating_plan`: Hopper decodes over quantized caches, and prefills over
    copies of pages."""
    if not query.shape[0] or not cache.key_cache.shape[0] or self._kernels == "portable":
        return None
    prefills = metadata.num_prefills or not metadata.num_decodes
    known = (_DECODES_ROTATE or not metadata.num_decodes) and (_PREFILLS_ROTATE or not prefills)
    if self.spec.batch_invariant or not known:
        return None
    call = LayerCall(query, key, value, cache, output, lse)
    plan = TritonPlan(self, signature, call, metadata, self._kernels, rotation)
    return plan if plan.rotates else None
