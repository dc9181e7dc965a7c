"""Memory of the GPUs of one host that the ranks of a group write for each other (X6).

An exchange of few bytes by NCCL takes a kernel for the queries and one for the results, and more to
arrange what they move. With memory that all ranks can write, two kernels do all of that: one puts
the queries of a rank where the attention of the others reads them, one sends partial states and
merges what it receives.
"""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from attnlib.ops.peer_buffers import PeerBuffers

__all__ = ["connect", "report"]

_log = logging.getLogger("attnlib")
_OF_TIMEOUT = 0.9
"""Of the timeout of a group, after which NCCL ends the process for a collective that waits behind
an exchange on its stream."""
_SECONDS = 0.2
"""Between two looks for an error. A kernel gives the host 2 s to report one."""


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
    own: torch.Tensor | None = None
    handle: Any = None
    offset, problem = 0, ""
    try:  # before the rendezvous, in which ranks wait for each other
        problem = _out_of_reach(index, uuids, [uuid for _, uuid in places])
        own = None if problem else _allocate(torch.device("cuda", index))
    except Exception as error:  # of any kind: other ranks wait
        problem = _not_shared(error)
    if not any(gather(problem)):
        assert own is not None  # no rank has a problem
        try:
            handle = _rendezvous(own, process_group)
            offset = own.data_ptr() - handle.buffer_ptrs[rank]
        except Exception as error:
            problem = _not_shared(error)
    found = gather((problem, offset))
    if reasons := [each for each, _ in found if each]:
        return reasons[:1]
    buffers: PeerBuffers | list[str] = []
    try:
        assert own is not None
        buffers = _buffers(handle, own, [each for _, each in found], rank, process_group)
        torch.cuda.synchronize(device)
    except Exception as error:
        problem = _not_shared(error)
    # From here on all buffers hold zeros.
    return [each for each in gather(problem) if each][:1] or buffers


def report(known: PeerBuffers | list[str], process_group: Any) -> threading.Thread | None:
    """Log why there are no buffers, or an exchange that does not end, from a thread, which is
    returned: where the engine waits for its GPU, CUDA raises an error without a cause.

    Args:
        known: of this rank.
        process_group: the thread ends with it.
    """
    if not isinstance(known, PeerBuffers):
        _log.info("divided layers exchange by messages: %s", "; ".join(known))
        return None
    buffers, lives, ends = known, weakref.ref(process_group), threading.Event()

    def watch() -> None:
        while not buffers.record.value:
            if ends.wait(_SECONDS) or lives() is None:
                return
        _log.error("%s", buffers.error())

    thread = threading.Thread(target=watch, name="attnlib exchanges", daemon=True)
    thread.start()
    atexit.register(_end, ends, thread)  # the interpreter would stop it anywhere
    return thread


def _end(ends: threading.Event, thread: threading.Thread) -> None:
    ends.set()
    thread.join()


def _out_of_reach(own: int, visible: list[str], used: list[str]) -> str:
    """Why a GPU cannot write the memory of those that ranks use; "" if it can."""
    if not set(used) <= set(visible):
        return "a rank does not see the GPUs of the others (CUDA_VISIBLE_DEVICES)"
    others = [visible.index(each) for each in used]
    reach = all(each == own or torch.cuda.can_device_access_peer(own, each) for each in others)
    return "" if reach else "a GPU cannot write the memory of another"


def _not_shared(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"the memory of GPUs cannot be shared: {type(error).__name__}: {first}"


def _allocate(device: torch.device) -> torch.Tensor:
    """The zeros of this rank, in memory that others may write."""
    from torch.distributed import _symmetric_memory as symmetric

    return symmetric.empty(PeerBuffers.num_bytes(), dtype=torch.uint8, device=device).zero_()


def _rendezvous(own: torch.Tensor, process_group: Any) -> Any:
    """torch's handle of the memory of all ranks, which wait for each other."""
    from torch.distributed import _symmetric_memory as symmetric

    group: Any = process_group or dist.group.WORLD
    return symmetric.rendezvous(own, group)


def _buffers(
    handle: Any, own: torch.Tensor, offsets: list[int], rank: int, process_group: Any
) -> PeerBuffers:
    """The buffers of all ranks, which begin at these offsets in the memory of the handle: torch may
    take them from a larger block."""
    found = [
        handle.get_buffer(each, tuple(own.shape), torch.uint8, offset)
        for each, offset in enumerate(offsets)
    ]
    group: Any = process_group or dist.group.WORLD
    options = getattr(group._get_backend(own.device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return PeerBuffers.of(found, rank, own, handle, limit=timeout * _OF_TIMEOUT)
