"""`generate_batch`: transformers' paged cache is attnlib's paged cache.

A layer with full attention writes by slot and attends by block table, over two strided views of transformers' own memory; nothing is gathered.
Its table comes from the step's read and write indices (or is handed over, on the fast path for decodes). Sliding layers keep a rolling buffer
that no table describes: the cache gathers their few keys, and the kernel reads those as one-token blocks.

CUDA graphs capture the steps, so on a GPU nothing here reads from the device: lengths stay there, and every size is an upper bound that transformers
gives as an int. A backend that needs lengths on the host (it says so, `AttentionMetadataBuilder.needs_host_lengths`) can serve, at the price of one
copy for each batch, but not be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.layers import Call, builder_for, layer_for
from attnlib.integrations.transformers.pages import token_pages
from attnlib.integrations.transformers.storage import LayerStorage, layer_storage, sliding_update
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["attend_continuous"]


@dataclass(eq=False)
class _Step:
    """What the layers of one step share; a layer that comes again, other tensors, or a capture that begins, begins a new one."""

    starts: torch.Tensor
    capturing: bool
    seen: set[int] = field(default_factory=set)
    metadata: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Session:
    """What one paged cache of transformers keeps: its current step, and all that captured graphs still point to."""

    step: _Step | None = None
    captured: list[_Step] = field(default_factory=list)


_sessions: WeakKeyDictionary[Any, _Session] = WeakKeyDictionary()


def attend_continuous(call: Call, cache: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Write this step's keys and values to transformers' paged cache, then attend: `[1, T, Hq, Dv]`.

    Args:
        call: query `[1, Hq, T, D]`, key and value `[1, Hkv, T, D]`: the requests' new tokens, packed.
        cache: transformers' `PagedAttentionCache`.
        kwargs: the step's arguments as transformers passes them to every layer.

    Raises:
        UnsupportedConfigError: a CUDA graph is being captured and the backend cannot be.
    """
    index = call.layer_idx
    storage = layer_storage(cache, index)
    step = _step_of(cache, index, kwargs)
    if storage.pages is None:
        return _attend_gathered(call, cache, storage, step, kwargs)
    spec = call.spec(block_size=storage.pages.block_size, sliding_window=call.sliding_window)
    layer = layer_for(call, spec)
    key = (layer.backend, spec, storage.group)
    if key not in step.metadata:
        lengths = _lengths(storage, step, kwargs)
        table, slots, longest = _placement(storage, lengths, kwargs, call.query.shape[2])
        common = _common(layer, step, lengths, kwargs, call.query.shape[2], longest).replace(
            block_table_tensor=table, slot_mapping=slots
        )
        step.metadata[key] = builder_for(layer.backend, spec, call.query.device).build(0, common)
    rows = (states[0].transpose(0, 1) for states in (call.query, call.key, call.value))
    out: torch.Tensor = layer(*rows, storage.pages, step.metadata[key])
    return out.unsqueeze(0)


def _attend_gathered(
    call: Call, cache: Any, storage: LayerStorage, step: _Step, kwargs: dict[str, Any]
) -> torch.Tensor:
    """A sliding layer: its keys, gathered by the cache, lie packed like the queries, each request's window and new tokens together."""
    keys, values = sliding_update(cache, call, kwargs)
    pages, _ = token_pages(keys, values)
    spec = call.spec(block_size=1, sliding_window=call.sliding_window)
    layer = layer_for(call, spec)
    key = (layer.backend, spec, storage.group)
    if key not in step.metadata:
        starts, lengths = storage.key_starts(kwargs), _lengths(storage, step, kwargs)
        longest = min(storage.longest(kwargs), keys.shape[2])
        table = starts[:-1, None] + torch.arange(longest, dtype=torch.int32, device=starts.device)
        common = _common(layer, step, lengths, kwargs, call.query.shape[2], longest).replace(
            block_table_tensor=table
        )
        step.metadata[key] = builder_for(layer.backend, spec, call.query.device).build(0, common)
    out: torch.Tensor = layer(call.query[0].transpose(0, 1), None, None, pages, step.metadata[key])
    return out.unsqueeze(0)


def _step_of(cache: Any, index: int, kwargs: dict[str, Any]) -> _Step:
    """The current step. transformers makes its tensors anew for each, except that a capture repeats the step before it with the same ones."""
    session = _sessions.setdefault(cache, _Session())
    starts: torch.Tensor = kwargs["cu_seq_lens_q"]
    capturing = starts.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    step = session.step
    if (
        step is None
        or step.starts is not starts
        or step.capturing != capturing
        or index in step.seen
    ):
        step = session.step = _Step(starts, capturing)
        if capturing:
            session.captured.append(
                step
            )  # a graph replays into the workspace and tables that it was captured with
    step.seen.add(index)
    return step


def _lengths(storage: LayerStorage, step: _Step, kwargs: dict[str, Any]) -> torch.Tensor:
    """[R] int32; keys of each request. Requests that pad a graph's batch have none."""
    starts = storage.key_starts(kwargs)
    return starts[1:] - starts[:-1]


def _placement(
    storage: LayerStorage, lengths: torch.Tensor, kwargs: dict[str, Any], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(block table, slot mapping, longest sequence) of a layer with full attention."""
    from attnlib.cache.slots import compute_slot_mapping

    assert storage.pages is not None  # the caller has looked
    block_size, starts = storage.pages.block_size, kwargs["cu_seq_lens_q"].to(torch.int32)
    if kwargs.get("block_table") is not None:
        table: torch.Tensor = kwargs["block_table"][storage.group]
        slots = compute_slot_mapping(starts, lengths, table, block_size, num_tokens)
        return table, slots, table.shape[1] * block_size
    read, write = kwargs["read_index"][storage.group], kwargs["write_index"][storage.group]
    # Without anything to read, all requests are new, and what they write is all they have.
    source, begins = (read, storage.key_starts(kwargs)) if read.numel() else (write, starts)
    longest = min(storage.longest(kwargs), source.numel())
    columns = torch.arange(-(-longest // block_size), device=source.device) * block_size
    places = (begins[:-1, None] + columns).clamp_(max=source.numel() - 1)
    table = (source[places] // block_size).to(torch.int32)
    tokens = torch.arange(write.numel(), device=write.device)
    return (
        table,
        torch.where(tokens < starts[-1], write, -1),
        longest,
    )  # padding writes nothing (P4) instead of to a trash block


def _common(
    layer: Attention,
    step: _Step,
    lengths: torch.Tensor,
    kwargs: dict[str, Any],
    num_tokens: int,
    longest: int,
) -> CommonAttentionMetadata:
    """The batch, with its lengths on the host where they can be had for nothing, or the backend needs them (one copy, which waits)."""
    starts = step.starts.to(torch.int32)
    on_host = _wants_host_lengths(layer, starts)
    if on_host and step.capturing:
        raise UnsupportedConfigError(
            f"backend {layer.backend.get_name()} needs lengths on the host, which a CUDA graph cannot give: pass "
            f"ContinuousBatchingConfig(use_cuda_graph=False), or choose another backend",
            backend=layer.backend.get_name(),
        )
    # Unknown lengths are 0 on the host: a batch of more than decodes then goes the prefill way as a whole.
    both = (
        torch.cat([starts, lengths]).cpu()
        if on_host
        else torch.zeros(starts.numel() + lengths.numel(), dtype=torch.int32)
    )
    starts_cpu, lengths_cpu = both[: starts.numel()], both[starts.numel() :]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=lengths,
        seq_lens_cpu=lengths_cpu,
        num_computed_tokens_cpu=lengths_cpu - (starts_cpu[1:] - starts_cpu[:-1]),
        num_reqs=lengths.shape[0],
        num_actual_tokens=num_tokens,
        max_query_len=min(
            int(kwargs.get("max_length_q") or kwargs.get("max_seqlen_q") or num_tokens), num_tokens
        ),
        max_seq_len=longest,
    )


def _wants_host_lengths(layer: Attention, starts: torch.Tensor) -> bool:
    return starts.device.type == "cpu" or layer.backend.get_builder_cls().needs_host_lengths
