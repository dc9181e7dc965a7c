"""Exchanges between the GPUs of one host by writes into each other's memory."""

from __future__ import annotations

import triton
from torch import Tensor

from attnlib.ops.checks import vector_elements
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.heuristics.device import device_guard, limits_of, programmatic_launch
from attnlib.ops.triton.kernels.peer_exchange import merge_from_peers_kernel, share_heads_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["merge_from_peers", "share_heads"]

_ELEMENTS = 2048
"""Elements that a program shares with one rank."""
_MERGED_ELEMENTS = 512
"""Elements of the output that a program merges."""


def share_heads(own: Tensor, peers: PeerBuffers) -> Tensor:
    """Gather the rows of all ranks, which call this together.

    Args:
        own: `[rows, size]`, dense.
        peers: the buffers.

    Returns:
        `[rows, world_size, size]` in the buffer, until the next exchange.
    """
    rows, size = own.shape
    world = len(peers.distances)
    shared = peers.shared[: own.nbytes * world].view(own.dtype).view(rows, world, size)
    lanes = min(triton.next_power_of_2(size), _ELEMENTS)
    block_rows = _ELEMENTS // lanes
    programs = triton.cdiv(rows, block_rows) * triton.cdiv(size, lanes) * world
    key = ("share heads", own.get_device(), own.shape, own.dtype, peers.rank, world)
    launch = LAUNCHES.get(key) or LAUNCHES.keep(
        key,
        BoundLaunch(
            share_heads_kernel,
            (programs, 1, 1),
            {
                "WORLD": world,
                "SIZE": size,
                "ROWS": block_rows,
                "LANES": lanes,
                "VEC": vector_elements("own", own[:, None]),
                "FLAGS": peers.share_flags.shape[1],
                "ON_GPU": not chips.INTERPRETED,
                "num_warps": 4,
                **programmatic_launch(limits_of(own), programs),
            },
        ),
    )
    tensors = (own, shared, peers.share_flags, peers.share_counts, peers.distances)
    _run(launch, own, tensors, (rows, peers.rank))
    return shared


def merge_from_peers(
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    peers: PeerBuffers,
    *,
    num_kv_heads: int,
    has_state: bool,
    sinks: Tensor | None,
) -> None:
    """Exchange partial states and merge those of the own heads, after `share_heads`.

    Args:
        partial: `[T, num_kv_heads * world_size * n, Dv]` over the keys of this rank: heads of one
            KV head are adjacent, n of each rank in their order.
        partial_lse: `[T, the same heads]` float32.
        out: `[T, num_kv_heads * n, Dv]`, written.
        lse: `[T, num_kv_heads * n]` float32, written.
        peers: the buffers.
        num_kv_heads: of each rank.
        has_state: whether `out` and `lse` hold a state over other keys.
        sinks: `[num_kv_heads * n]`, counted once, or None.
    """
    partial, partial_lse = partial.contiguous(), partial_lse.contiguous()
    tokens, heads, size = out.shape
    world = len(peers.distances)
    count = world * out.numel() * out.element_size()
    start = -(-count // 16) * 16
    received = peers.received[:count].view(out.dtype).view(world, tokens, heads, size)
    received_lse = peers.received[start : start + world * lse.nbytes].view(lse.dtype)
    states = (partial, partial_lse, out, lse, lse if sinks is None else sinks)
    key = (
        *("merge from peers", out.get_device(), out.shape, has_state, sinks is None),
        *(peers.rank, num_kv_heads, world, *((x.dtype, x.stride()) for x in states)),
    )
    launch = LAUNCHES.get(key) or LAUNCHES.keep(
        key, _merge_launch(partial, out, received, peers, has_state, sinks is not None)
    )
    numbers = (
        *(tokens, heads, heads // num_kv_heads, peers.rank),
        *(partial.stride(0), partial.stride(1), partial_lse.stride(0)),
        *(out.stride(0), out.stride(1), lse.stride(0)),
    )
    own = (peers.merge_flags, peers.merge_counts, peers.distances)
    _run(launch, out, (*states, received, received_lse, *own), numbers)


def _merge_launch(
    partial: Tensor,
    out: Tensor,
    received: Tensor,
    peers: PeerBuffers,
    has_state: bool,
    has_sink: bool,
) -> BoundLaunch:
    tokens, heads, size = out.shape
    padded = triton.next_power_of_2(size)
    block_h = max(1, min(triton.next_power_of_2(heads), _MERGED_ELEMENTS // padded))
    programs = tokens * triton.cdiv(heads, block_h)
    constants = {
        "HAS_STATE": has_state,
        "HAS_SINK": has_sink,
        "WORLD": len(peers.distances),
        "DV": size,
        "DV_PAD": padded,
        "BLOCK_H": block_h,
        "FLAGS": peers.merge_flags.shape[1],
        "VEC_P": vector_elements("partial", partial),
        "VEC_R": vector_elements("received", received),
        "VEC_O": vector_elements("out", out),
        "ON_GPU": not chips.INTERPRETED,
        "num_warps": 4,
        **programmatic_launch(limits_of(out), programs),
    }
    return BoundLaunch(merge_from_peers_kernel, (programs, 1, 1), constants)


def _run(
    launch: BoundLaunch, like: Tensor, tensors: tuple[Tensor, ...], numbers: tuple[int, ...]
) -> None:
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    with device_guard(like):
        launch.run((*tensors, *numbers), addresses, like.get_device())
