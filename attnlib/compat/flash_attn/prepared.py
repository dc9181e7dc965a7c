"""Layers and metadata of calls without metadata: made at the first call of a kind, then reused.

FlashAttention's functions get lengths and block tables as tensors in every call. A *prepared call*
holds what follows from everything but their values: the layer with its selected backend, and the
metadata of the batch. Kernels read lengths and tables from device memory when they run, so a
prepared call stays correct when the values change in place, by any writer, and when a captured CUDA
graph is replayed. Nothing here is derived from the values of a tensor and kept.

A backend that reads lengths on the host (`AttentionMetadataBuilder.needs_host_lengths`) gets new
metadata, and with it a synchronization, in every call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.compat.flash_attn.execution import Execution, execution, same_execution
from attnlib.errors import UnsupportedConfigError
from attnlib.layer import Attention
from attnlib.layer.call import LayerCall
from attnlib.layer.plans import find_plan, run_plan
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec

__all__ = [
    "MAX_PREPARED", "STATE", "Batch", "Execution", "PreparedBatch", "address", "execution",
    "layer_for", "prepared", "same_execution", "signature",
]  # fmt: skip

MAX_PREPARED = 64
"""Prepared calls that a thread keeps; the least recently used one is dropped. Calls that a CUDA
graph captured are kept beyond this number, because the graph holds addresses of their buffers."""

T = TypeVar("T")


class _State(threading.local):
    """The prepared calls of a thread. Threads share none, so that two calls at the same time never
    use one buffer."""

    def __init__(self) -> None:
        self.calls: OrderedDict[Hashable, Any] = OrderedDict()
        self.captured: dict[Hashable, Any] = {}
        self.layers: OrderedDict[Hashable, Attention] = OrderedDict()
        self.builders: OrderedDict[Hashable, AttentionMetadataBuilder[Any]] = OrderedDict()
        self.recent: Any = None


STATE = _State()


def signature(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Dtype, shape and strides of a tensor."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride())


def address(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What a kernel that reads `tensor` depends on, besides its values."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def prepared(key: Hashable, where: Execution, make: Callable[[], T]) -> T:
    """The prepared call with this key, made by `make` if there is none."""
    full = (key, where)
    if where.capturing:
        if full not in STATE.captured:
            STATE.captured[full] = make()
        found: T = STATE.captured[full]
    else:
        found = _kept(STATE.calls, full, make)
    return found


def layer_for(
    spec: AttentionSpec,
    scale: float,
    device: torch.device,
    where: Execution,
    alibi_slopes: torch.Tensor | None,
) -> Attention:
    """The layer for a spec and scale, on the backend that is selected now.

    Raises:
        UnsupportedConfigError: the selected backend, or no backend, supports the spec; the message
            has all reasons.
    """
    key = (spec, scale, device, where.selection)

    def make() -> Attention:
        return Attention(spec, scale=scale, alibi_slopes=alibi_slopes, device=device)

    return _kept(STATE.layers, key, make)


def _kept(kept: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """The value with this key, made if there is none; the least recently used one is dropped."""
    found: T | None = kept.get(key)
    if found is None:
        found = kept[key] = make()
        if len(kept) > MAX_PREPARED:
            kept.popitem(last=False)
    else:
        kept.move_to_end(key)
    return found


class Batch(NamedTuple):
    """A batch whose lengths are on the device.

    Attributes:
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32.
        block_table: `[R, M]` int32.
        num_tokens: T.
        max_query_len, max_seq_len: upper bounds that hold for all values of the lengths.
        query_lens: the query length of every request, if it is the same and does not change.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_lens: int | None

    def request(self, index: int) -> Batch:
        """One request of a batch with equal query lengths, as a batch; its tensors are views."""
        one = slice(index, index + 1)
        assert self.query_lens is not None
        return self._replace(
            query_start_loc=self.query_start_loc[:2],
            seq_lens=self.seq_lens[one],
            block_table=self.block_table[one],
            num_tokens=self.query_lens,
        )


class PreparedBatch:
    """A layer and the metadata of a batch.

    Args:
        layer: the layer.
        batch: the batch.
        where: where it runs.

    Raises:
        UnsupportedConfigError: a CUDA graph is being captured, and the selected backend reads
            lengths on the host.
    """

    def __init__(self, layer: Attention, batch: Batch, where: Execution) -> None:
        self.layer = layer
        self.batch = batch
        spec, device = layer.spec, batch.seq_lens.device
        # One builder for all batches on a stream: they share its scratch memory.
        self._builder = _kept(
            STATE.builders,
            (layer.backend, spec, device, where),
            lambda: layer.backend.make_builder(spec, device),
        )
        self.metadata: AttentionMetadata | None = None
        if not self._builder.needs_host_lengths:
            self.metadata = self._build(on_host=False)
        elif where.capturing:
            name = layer.backend.get_name()
            raise UnsupportedConfigError(
                f"backend {name} reads lengths on the host, which a CUDA graph cannot capture: use "
                "a backend that reads them on the device, for example triton",
                backend=name,
                reasons=["cudagraph"],
            )

    def plan(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> Callable[[], None]:
        """Check a call on `[T, Hq, D]` queries and prepare it; the result runs it. A backend that
        reads lengths on the host reads them here.

        Raises:
            ContractError, LayoutMismatchError: as `Attention.attend`.
        """
        layer, metadata = self.layer, self.metadata or self._build(on_host=True)

        def use_slopes() -> None:
            if alibi_slopes is not None:
                layer.alibi_slopes = alibi_slopes  # calls share the layer

        def run() -> None:
            use_slopes()
            run_plan(layer, plan, call, output, lse)

        use_slopes()
        call = LayerCall(query, None, None, cache, metadata, output, lse is not None)
        plan, _ = find_plan(layer, call)
        return run

    def _build(self, on_host: bool) -> AttentionMetadata:
        batch = self.batch
        requests, starts = batch.seq_lens.shape[0], None
        if batch.query_lens is not None:
            starts = torch.arange(requests + 1, dtype=torch.int32, device="cpu") * batch.query_lens
        elif on_host:
            starts = batch.query_start_loc.cpu()
        lengths = batch.seq_lens.cpu() if on_host else None
        longest = batch.max_seq_len
        if lengths is not None:
            longest = int(lengths.max()) if requests else 0
        common = CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=starts,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=lengths,
            num_reqs=requests,
            num_actual_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=longest,
            block_table_tensor=batch.block_table,
            is_cross_attention=True,  # keys may be fewer than queries
        )
        metadata: AttentionMetadata
        if on_host:
            metadata = self._builder.build(0, common)
        else:
            # Metadata that is kept must not hold copies of tensors whose values change; metadata
            # for a capture holds none.
            metadata = self._builder.build_for_cudagraph_capture(common)
        return metadata
