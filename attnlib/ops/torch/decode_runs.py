"""Decodes whose keys lie in a few runs of consecutive blocks, read in place.

Each run is one call of fused attention over views of the cache; the runs of all requests are
combined by their LSE together. A copy of long runs would cost more than a call for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.ops.torch.batch import Request
from attnlib.ops.torch.fused import FusedQuery
from attnlib.ops.torch.gather import consecutive_blocks
from attnlib.ops.torch.paged import PagedInputs, visible_range

__all__ = ["Runs", "runs_of_requests"]

# Bytes of K that a run has on average; the call for one costs as much as a copy of these.
_LEAST_BYTES = 1 << 16
_SHORT = (torch.float16, torch.bfloat16)


class _Run(NamedTuple):
    """Adjacent keys: `num_keys` of them, from a slot of a block on."""

    block: int
    slot: int
    num_keys: int


@dataclass(frozen=True, eq=False)
class Runs:
    """Requests of one query token, those with the most runs first.

    Attributes:
        requests: the requests.
        rows: `[G]` their query tokens.
        runs: of each request, in the order of their keys.
    """

    requests: list[Request]
    rows: Tensor
    runs: list[list[_Run]]

    def attend(
        self, inputs: PagedInputs, dtype: torch.dtype, out: Tensor, lse: Tensor | None
    ) -> None:
        """Write `out` and `lse` of these requests; computes in `dtype`."""
        keys, values = inputs.key_cache, inputs.value_cache
        query = FusedQuery(
            inputs.query[self.rows].unsqueeze(2),
            keys.shape[2],
            values.shape[3],
            None,
            inputs.params,
            inputs.k_factor,
            inputs.v_factor,
            dtype=dtype,
        )
        states = []
        for place in range(len(self.runs[0])):
            found = [
                query.attend(_view(keys, runs[place]), _view(values, runs[place]), member=member)
                for member, runs in enumerate(self.runs)
                if place < len(runs)
            ]
            outs, logs = (torch.cat(parts) for parts in zip(*found, strict=True))
            missing = len(self.runs) - len(found)
            if missing:  # states without keys
                outs = torch.cat([outs, outs.new_zeros(missing, *outs.shape[1:])])
                logs = torch.cat([logs, logs.new_full((missing, *logs.shape[1:]), -torch.inf)])
            states.append((outs, logs))
        result, total = query.combine(states, [slice(None)] * len(states))
        out[self.rows] = result[:, :, 0].to(out.dtype)
        if lse is not None:
            lse[self.rows] = total[:, :, 0].to(lse.dtype)


def runs_of_requests(
    requests: list[Request], inputs: PagedInputs, dtype: torch.dtype
) -> tuple[Runs | None, list[Request]]:
    """(the requests to read in place, those to gather) of requests of a few tokens.

    Requests of several tokens whose keys lie in one run are in neither: their rows see different
    keys.
    """
    params, found, gathered = inputs.params, [], []
    biased = params.alibi_slopes is not None or params.query_bias is not None
    for request in requests:
        if biased or request.query_len > 1:
            blocks = inputs.blocks(request)
            views = (consecutive_blocks(x, blocks) for x in (inputs.key_cache, inputs.value_cache))
            if any(view is None for view in views):
                gathered.append(request)
            continue
        begins = _begins(request, inputs)
        if len(begins) == 1 or _are_long(request, len(begins), inputs, dtype):
            found.append((request, _runs(request, begins, inputs)))
        else:
            gathered.append(request)
    if not found:
        return None, gathered
    found.sort(key=lambda item: len(item[1]), reverse=True)
    rows = torch.tensor([request.start for request, _ in found], device="cpu")
    return Runs([request for request, _ in found], rows, [runs for _, runs in found]), gathered


def _are_long(request: Request, num_runs: int, inputs: PagedInputs, dtype: torch.dtype) -> bool:
    """Whether several runs cost less in place than a copy. In half precision the result of each
    would be rounded, and few heads would leave threads without work."""
    cache, (start, end) = inputs.key_cache, visible_range(request, inputs.params)
    heads, size = cache.shape[2], cache.shape[3]
    if dtype in _SHORT or heads < torch.get_num_threads():
        return False
    return (end - start) * heads * size * cache.element_size() >= _LEAST_BYTES * num_runs


def _begins(request: Request, inputs: PagedInputs) -> list[int]:
    """For each run of a request, its first block among those that hold a visible key."""
    blocks, size = inputs.blocks(request), inputs.key_cache.shape[1]
    caches = inputs.key_cache, inputs.value_cache
    if any(cache.stride(0) != size * cache.stride(1) for cache in caches):
        return list(range(blocks.numel()))
    breaks: list[int] = (blocks[1:] != blocks[:-1] + 1).nonzero()[:, 0].tolist()
    return [0, *(before + 1 for before in breaks)]


def _runs(request: Request, begins: list[int], inputs: PagedInputs) -> list[_Run]:
    """The runs of the keys that a request of one token sees."""
    (start, end), size = visible_range(request, inputs.params), inputs.key_cache.shape[1]
    blocks, runs = inputs.blocks(request), []
    first = start // size * size  # position of slot 0 of the first block
    for begin, stop in zip(begins, [*begins[1:], blocks.numel()], strict=True):
        seen = max(start, first + begin * size), min(end, first + stop * size)
        runs.append(_Run(int(blocks[begin]), seen[0] - first - begin * size, seen[1] - seen[0]))
    return runs


def _view(cache: Tensor, run: _Run) -> Tensor:
    """The keys or values of a run, `[1, Hkv, S, D]`."""
    per_block, per_slot, per_head, element = cache.stride()
    begin = cache.storage_offset() + run.block * per_block + run.slot * per_slot
    shape = (1, cache.shape[2], run.num_keys, cache.shape[3])
    return cache.as_strided(shape, (0, per_head, per_slot, element), begin)
