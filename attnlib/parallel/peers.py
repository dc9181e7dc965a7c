"""Memory of the GPUs of one host that the ranks of a group write for each other (X6).

An exchange of few bytes by NCCL takes a kernel for the queries and one for the results, and more to
arrange what they move. With memory that all ranks can write, two kernels do all of that: one puts
the queries of a rank where the attention of the others reads them, one sends partial states and
merges what it receives.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from attnlib.ops.peer_buffers import PeerBuffers

__all__ = ["connect"]


def connect(
    device: torch.device,
    world_size: int,
    rank: int,
    gather: Callable[[Any], list[Any]],
    process_group: Any,
) -> PeerBuffers | list[str]:
    """The buffers of a group, all ranks of which call this together, or why there are none.

    Args:
        device: of this rank.
        world_size, rank: of the group.
        gather: gives the objects of all ranks.
        process_group: of torch.distributed.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return [f"device={device}: it needs NVIDIA GPUs of one host"]
    index = torch.cuda.current_device() if device.index is None else device.index
    uuids = [
        str(torch.cuda.get_device_properties(each).uuid)
        for each in range(torch.cuda.device_count())
    ]
    places = gather((socket.gethostname(), uuids[index]))
    if len({host for host, _ in places}) > 1:
        return ["the ranks are on several hosts"]
    if len(set(places)) < world_size:
        return ["two ranks are on one GPU"]
    others = [uuids.index(uuid) if uuid in uuids else None for _, uuid in places]
    reach = all(
        other == index or (other is not None and torch.cuda.can_device_access_peer(index, other))
        for other in others
    )
    buffers: PeerBuffers | None = None
    problem = "" if reach else "a GPU cannot write the memory of another"
    if not any(gather(problem)):
        try:
            buffers = _rendezvous(torch.device("cuda", index), world_size, rank, process_group)
        except Exception as error:  # of any kind: other ranks wait
            first = str(error).partition("\n")[0]
            problem = f"the memory of GPUs cannot be shared: {type(error).__name__}: {first}"
    if reasons := [each for each in gather(problem) if each]:
        return reasons[:1]
    assert buffers is not None
    torch.cuda.synchronize(device)
    gather(None)  # all buffers hold zeros
    return buffers


def _rendezvous(
    device: torch.device, world_size: int, rank: int, process_group: Any
) -> PeerBuffers:
    from torch.distributed import _symmetric_memory as symmetric

    size = PeerBuffers.num_bytes()
    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    own.zero_()
    group: Any = process_group or dist.group.WORLD
    handle = symmetric.rendezvous(own, group)
    found = [handle.get_buffer(each, (size,), torch.uint8) for each in range(world_size)]
    return PeerBuffers.of(found, rank, own, handle)
