"""Eager layer calls whose host time is measured: the layer, its batches, and its bare launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import attnlib

__all__ = [
    "BATCHES",
    "BURST",
    "WARM",
    "LayerCall",
    "launch_microseconds",
    "launch_times",
    "warm_up",
]

BURST = 64
"""Calls in one round on a GPU: fewer launches than a stream holds before it makes the host wait."""

WARM = 16
"""Calls before a burst."""

BATCHES = {
    "decode of 1 x 1024": ([1], [1024]),
    "decode of 1 x 8192": ([1], [8192]),
    "decode of 64 x 128": ([1] * 64, [128] * 64),
    "decode of 64 x 2048": ([1] * 64, [2048] * 64),
    "prefill of 1 x 512": ([512], [512]),
    "prefill of 4 x 256 over 2048": ([256] * 4, [2048] * 4),
    "mixed batch of 16 x 2048 and 256": ([1] * 16 + [256], [2048] * 16 + [256]),
    "mixed batch of 16 x 128 and 256": ([1] * 16 + [256], [128] * 16 + [256]),
}


class LayerCall:
    """Eager calls of a Llama-like layer of the triton backend over one batch: cache write and
    attention, through the `nn.Module`.

    Args:
        query_lens, seq_lens: of the batch.
        device: of the tensors.
        backend: a name or a class.
        layer: arguments of `Attention` besides these.
        fields: more fields of the spec.
    """

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        *,
        device: str = "cuda",
        backend: Any = "triton",
        layer: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.spec = attnlib.AttentionSpec(
            num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16,
            **fields,
        )  # fmt: skip
        pages = [-(-length // 16) for length in seq_lens]
        order = iter(torch.randperm(sum(pages)).tolist())
        table = [[next(order) for _ in range(count)] for count in pages]
        self.common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, 16, device
        )
        self.layer = attnlib.Attention(self.spec, backend=backend, device=device, **(layer or {}))
        self.cache = attnlib.PagedKVCache.allocate(self.spec, sum(pages), device)
        self.builder = self.layer.backend.make_builder(self.spec, device)
        self.metadata = self.builder.build(0, self.common)
        sizes = [(sum(query_lens), heads, 128) for heads in (32, 8, 8)]
        self.tensors = [torch.randn(size, device=device).to(torch.bfloat16) for size in sizes]
        self.out = torch.empty_like(self.tensors[0])

    def __call__(self) -> None:
        """One call into an existing output."""
        self.layer(*self.tensors, self.cache, self.metadata, output=self.out)

    def allocating(self) -> None:
        """One call that allocates its output."""
        self.layer(*self.tensors, self.cache, self.metadata)

    def first_layers(self, count: int) -> Callable[[], None]:
        """A call as the first layer of a step, over metadata that was built before: `count` calls
        have one each."""
        steps = iter([self.builder.build(0, self.common) for _ in range(count)])

        def call() -> None:
            self.metadata = next(steps)
            self()

        return call

    def bare_launches(self) -> Callable[[], None]:
        """The kernels of one call by the driver call alone, with all arguments at hand. The layer
        has been called twice over this metadata."""
        from attnlib.ops.triton.launch.bound import current_stream
        from attnlib.ops.triton.launch.sequence import Source

        ((plan, _),) = self.metadata.plans.values()
        launches, batch = plan._launches, plan._batch
        (query, key, value), cache, impl = self.tensors, self.cache, self.layer.impl
        values = [
            x.data_ptr() if isinstance(x, torch.Tensor) else x
            for x in (
                query, cache.key_cache, cache.value_cache, self.out, None, key, value,
                *impl.per_head_tensors, cache.k_scale, cache.v_scale, *impl.layer_score_tensors,
            )
        ]  # fmt: skip
        recorded: list[tuple[Callable[..., None], list[Any]]] = []
        slots = (batch.slots.data_ptr(),)
        recorded += launches.write.launches(True).calls(values, slots)
        for bound, of_prefill in launches.attention(True, True):
            part, tensors = launches.decode, batch.decodes
            given = list(values)
            if of_prefill:
                part, tensors = launches.prefill, batch.prefills
                for source, offset in launches.row_offsets.items():
                    given[source] = given[source] and given[source] + offset
            recorded += bound.calls(given, part.addresses(tensors))
        assert not any(isinstance(x, Source) for _, given in recorded for x in given)
        index = query.get_device()

        def launch() -> None:
            for function, arguments in calls:
                function(*arguments)

        calls = [(function, (current_stream(index), *given)) for function, given in recorded]
        return launch


def launch_times(*calls: Callable[[], object], rounds: int = 60) -> list[list[float]]:
    """For each call, the host's mean time for one of `BURST` calls in each round, in microseconds.

    The calls take turns, so that a change of the machine's speed affects all of them alike. Before
    a burst the host waits for the GPU, after which it is slower for a while: `WARM` calls that are
    not measured come first. Three rounds at the beginning are not counted.
    """
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 3):
        for call, found in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            for _ in range(WARM):
                call()
            began = time.perf_counter()
            for _ in range(BURST):
                call()
            if number >= 3:
                found.append((time.perf_counter() - began) / BURST * 1e6)
    torch.cuda.synchronize()
    return times


def launch_microseconds(*calls: Callable[[], object], rounds: int = 60) -> list[float]:
    """For each call, the median of its `launch_times`."""
    return [statistics.median(found) for found in launch_times(*calls, rounds=rounds)]


def warm_up(call: LayerCall) -> None:
    """`attnlib.warmup` within the limits of `BATCHES`."""
    limits = attnlib.BatchLimits(
        max_num_reqs=max(len(queries) for queries, _ in BATCHES.values()),
        max_num_tokens=max(sum(queries) for queries, _ in BATCHES.values()),
        max_seq_len=max(max(lengths) for _, lengths in BATCHES.values()),
    )
    attnlib.warmup(call.layer, call.cache, limits, builder=call.builder)
