"""Exchanges between the GPUs of one host, in words of data and the number of the exchange."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from attnlib.ops.checks import vector_elements
from attnlib.ops.peer_buffers import MERGED_WORDS, PeerBuffers, ShareTile
from attnlib.ops.split_states import SplitStates
from attnlib.ops.triton.heuristics.device import device_guard, limits_of, programmatic_launch
from attnlib.ops.triton.kernels.peer_words import merge_words_kernel, share_words_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["merge_words", "share_words"]

_SPLIT_ELEMENTS = 2048
"""Of the splits that a warp loads at a time: 64 in each of 32 threads."""
_MOST_WARPS = 8
"""Of a program that combines splits."""
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def share_words(own: Tensor, peers: PeerBuffers) -> Tensor:
    """Gather the rows of all ranks, which call this together.

    Args:
        own: `[rows, size]`, dense, of multiples of 4 bytes.
        peers: the buffers.

    Returns:
        `[rows, world_size, size]`.
    """
    world = len(peers.distances)
    if own.storage_offset() * own.element_size() % 4:  # between two words
        own = own.clone()
    shared = own.new_empty(own.shape[0], world, own.shape[1])
    source, target = own.view(torch.int32), shared.view(torch.int32)
    rows, size = source.shape
    tile = ShareTile.of(size)
    programs = tile.programs(rows) * world
    key = ("share words", own.get_device(), source.shape, peers.rank, world)
    launch = LAUNCHES.get(key) or LAUNCHES.keep(
        key,
        BoundLaunch(
            share_words_kernel,
            (programs, 1, 1),
            {
                "WORLD": world,
                "SIZE": size,
                "ROWS": tile.rows,
                "LANES": tile.lanes,
                "VEC": vector_elements("own", source[:, None]),
                "ON_GPU": _can_stop(own),
                "num_warps": 1,
                **programmatic_launch(limits_of(own), programs),
            },
        ),
    )
    tensors = (source, target, peers.shared, peers.share_counts, peers.distances, peers.waits)
    _run(launch, own, peers, tensors, (rows, peers.rank))
    return shared


def merge_words(
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    peers: PeerBuffers,
    *,
    num_kv_heads: int,
    sinks: Tensor | None,
    splits: SplitStates | None = None,
) -> None:
    """Exchange partial states and merge those of the own heads, after `share_words`.

    Args:
        partial: `[T, num_kv_heads * world_size * n, Dv]` over the keys of this rank: heads of one
            KV head are adjacent, n of each rank in their order.
        partial_lse: `[T, the same heads]` float32.
        out: `[T, num_kv_heads * n, Dv]`, written.
        lse: `[T, num_kv_heads * n]` float32, written.
        peers: the buffers.
        num_kv_heads: of each rank.
        sinks: `[num_kv_heads * n]`, counted once, or None.
        splits: of a decode that has not combined them; the tensors above have the other states.
    """
    words, partial_lse = partial.contiguous().view(torch.int32), partial_lse.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    heads, world = out.shape[1], len(peers.distances)
    states = (words, partial_lse, out, lse, lse if sinks is None else sinks)
    key = (
        *("merge words", out.get_device(), out.shape, num_kv_heads, sinks is None, splits is None),
        *(peers.rank, world, *((x.dtype, x.stride()) for x in states)),
    )
    launch = LAUNCHES.get(key) or LAUNCHES.keep(
        key, _merge_launch(words, out, world, sinks is not None, splits is not None)
    )
    numbers = (
        *(heads, heads // num_kv_heads, peers.rank),
        *(words.stride(0), words.stride(1), partial_lse.stride(0)),
        *(out.stride(0), out.stride(1), lse.stride(0)),
    )
    own = (peers.merged, peers.merged_lses, peers.merge_counts, peers.distances, peers.waits)
    none = peers.merge_counts
    found = SplitStates(lse, lse, none, none[:1, 0], 0) if splits is None else splits
    aligned, parts = (*states, *own, found.outs), (found.lses, found.headers, found.starts)
    last = (found.starts.shape[0] - 1, found.rows)
    _run(launch, out, peers, aligned, (*parts, *numbers, *last))


def _merge_launch(
    words: Tensor, out: Tensor, world: int, has_sink: bool, has_splits: bool
) -> BoundLaunch:
    """The launch of `merge_words`, whose `partial` is in words.

    No two warps may have the same words: each would load them at another time, and the wait would
    end when one of both has seen them arrive. The other would go on with older ones.
    """
    padded, lanes = triton.next_power_of_2(world), triton.next_power_of_2(words.shape[2])
    programs, limits = out.shape[0] * out.shape[1], limits_of(out)
    warps, step = max(1, min(4, padded * lanes // 256)), 0
    if has_splits:
        threads = 64 if limits.is_amd else 32
        warps = max(1, min(_MOST_WARPS, padded * lanes // threads))
        elements = padded * triton.next_power_of_2(out.shape[2])
        step = max(1, min(32, warps * _SPLIT_ELEMENTS // elements))
    return BoundLaunch(
        merge_words_kernel,
        (programs, 1, 1),
        {
            "HAS_SINK": has_sink,
            "WORLD": world,
            "WORLD_PAD": padded,
            "KIND": _KINDS[out.dtype],
            "SIZE": words.shape[2],
            "LANES": lanes,
            "WORDS": MERGED_WORDS,
            "VEC": vector_elements("partial", words),
            "STEP": step,
            "ON_GPU": _can_stop(out),
            "num_warps": warps,
            **programmatic_launch(limits, programs),
        },
    )


def _can_stop(tensor: Tensor) -> bool:
    """Whether kernels can end with an error: by PTX."""
    return isinstance(share_words_kernel, JITFunction) and not limits_of(tensor).is_amd


def _run(
    launch: BoundLaunch,
    like: Tensor,
    peers: PeerBuffers,
    tensors: tuple[Tensor, ...],
    others: tuple[Tensor | int, ...],
) -> None:
    peers.check()
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    with device_guard(like):
        launch.run((*tensors, *others), addresses, like.get_device())
    if not like.is_cuda:  # the kernel has ended, and cannot stop with an error
        peers.check()
