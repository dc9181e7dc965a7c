"""The ranks that share the keys of a layer: collectives of torch.distributed, and agreement (X8).

attnlib starts no processes. A `RankGroup` wraps a process group of the caller, with NCCL for
tensors on a GPU and gloo for tensors on a CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from attnlib.errors import AttnlibError, ContractError, RankLostError
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.parallel.peers import connect, report
from attnlib.parallel.process_groups import ranks_of

__all__ = ["RankGroup"]

Result = TypeVar("Result")

_PEERS: WeakKeyDictionary[Any, PeerBuffers | list[str]] = WeakKeyDictionary()
"""What the ranks of a process group have found; an engine may wrap one more than once."""
_TEXT = 400
_RECORD = 1 + 32 + _TEXT
"""Bytes of a record: whether the rank refuses, a digest of its facts, its text."""
_GRACE = timedelta(seconds=10)
"""How long a rank whose agreement has failed waits to hear the same of the others."""


class RankGroup:
    """Ranks that share keys.

    Args:
        process_group: of torch.distributed; None means the default group.
        cpu_group: a group of the same ranks with gloo, for agreements. Without it they use
            `process_group`; with NCCL alone they wait for the GPU.

    Attributes:
        world_size, rank: in the group.

    Raises:
        ContractError: torch.distributed is not initialized or does not know a group, this process
            has no rank in it, or `cpu_group` has other ranks. On this process, since it cannot ask
            the others.
    """

    def __init__(self, process_group: Any = None, cpu_group: Any = None) -> None:
        self._group = process_group
        self._cpu_group = process_group if cpu_group is None else cpu_group
        self._ranks = ranks_of("process_group", process_group)
        if (others := ranks_of("cpu_group", self._cpu_group)) != self._ranks:
            raise ContractError(
                f"cpu_group has the ranks {others}, process_group {self._ranks}: make it with "
                f"torch.distributed.new_group({self._ranks}, backend='gloo')",
                rule="X8",
            )
        self.world_size, self.rank = len(self._ranks), dist.get_rank(process_group)
        on_cpu = "cpu:" in str(dist.get_backend_config(self._cpu_group))
        self._record_device = torch.device("cpu" if on_cpu else "cuda")

    def check_device(self, device: torch.device) -> None:
        """Refuse a device whose tensors the process group cannot exchange.

        Raises:
            ContractError: it has no backend for them, or gloo for those of a GPU.
        """
        known = str(dist.get_backend_config(self._group))  # such as "cpu:gloo,cuda:nccl"
        backend = dict(each.split(":", 1) for each in known.split(",")).get(device.type)
        if backend is None or (backend == "gloo" and device.type != "cpu"):
            raise ContractError(
                f"device={device}: process_group exchanges by {known}: make it with "
                f"backend='cpu:gloo,cuda:nccl', or give the layer a device that it serves",
                rule="X8",
            )

    def all_gather(self, tensor: Tensor) -> Tensor:
        """`[world_size, ...]` of a tensor `[...]` of each rank, of any dtype."""
        tensor = tensor.contiguous()
        out = tensor.new_empty(self.world_size, *tensor.shape)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(_bytes(out), _bytes(tensor), group=self._group)
        return out

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Part i of `tensor` goes to rank i; part i of `out` comes from it. Both `[world_size *
        n, ...]`, contiguous, of one dtype."""
        dist.all_to_all_single(_bytes(out), _bytes(tensor), group=self._group)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of part `rank` of `tensor` `[world_size, ...]`, in its dtype."""
        out = tensor.new_empty(tensor.shape[1:])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(out.view(-1), tensor.view(-1), group=self._group)
        return out

    def peers(self, device: torch.device) -> PeerBuffers | list[str]:
        """The buffers by which the ranks exchange the states of their layers, or why there are
        none. All ranks call this together; equal on all of them. All layers over a process group
        have the same ones, and exchange on one stream at a time. What does not end is logged.

        Args:
            device: of this rank.
        """

        process_group = self._group or dist.group.WORLD
        known = _PEERS.get(process_group)
        if known is None:
            known = connect(device, self.world_size, self.rank, self._objects, self._group)
            if device.type == "cuda":  # those on a CPU do not decide for others
                _PEERS[process_group] = known
            report(known, process_group)
        return known

    def _objects(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._cpu_group)
        return found

    def start_shift(self, out: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Any]:
        """Begin to send `tensors` to the next rank of the ring, and to receive `out` from the one
        before; contiguous, of equal shapes and dtypes. Wait for the returned requests first."""
        after = self._ranks[(self.rank + 1) % self.world_size]
        before = self._ranks[(self.rank - 1) % self.world_size]
        sends = [dist.P2POp(dist.isend, _bytes(x), after, self._group) for x in tensors]
        receives = [dist.P2POp(dist.irecv, _bytes(x), before, self._group) for x in out]
        return list(dist.batch_isend_irecv([*sends, *receives]))

    def agree(self, facts: object, error: Exception | None = None) -> None:
        """Continue if no rank refuses and the facts of all ranks are equal; else every rank raises.

        Args:
            facts: what must be equal; its `repr` counts.
            error: why this rank refuses, or None.

        Raises:
            ContractError: on every rank, with the text of the first rank that refuses, or where the
                facts of the first two ranks differ.
            RankLostError: a rank does not answer within the timeout of the group. Over gloo it is
                named; with NCCL alone, torch.distributed ends the process.
        """
        own, text = repr(facts), f"{type(error).__name__}: {error}"
        text = str(error) if isinstance(error, AttnlibError) else text
        digest = hashlib.sha256(own.encode()).digest()
        shown = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
        record = torch.frombuffer(
            bytearray([error is not None]) + bytearray(digest + shown), dtype=torch.uint8
        ).to(self._record_device)
        records = [bytes(row) for row in self._records(record).tolist()]
        for rank, found in enumerate(records):
            if found[0]:
                raise ContractError(f"rank {rank} refuses: {_text(found)}", rule="X8") from error
            if found[:33] != records[0][:33]:
                first, other = itemgetter(0, rank)(self._objects(own))
                at = len(os.path.commonprefix([first, other]))
                start, end = max(0, at - 100), at + 100
                raise ContractError(
                    f"ranks 0 and {rank} disagree: ...{first[start:end]} and ...{other[start:end]}"
                    "; give all ranks of a group the same batch and layer",
                    rule="X8",
                )

    def _records(self, own: Tensor) -> Tensor:
        """`[world_size, _RECORD]`, of all ranks."""
        out = own.new_empty(self.world_size, _RECORD)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        try:
            gather(out.view(-1), own, group=self._cpu_group)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].partition(". This is ")[0]
            raise RankLostError(
                f"{self._lost()}: {reason}: find the error of that rank and end the others, or "
                "give the process group a longer timeout"
            ) from error
        return out

    def _lost(self) -> str:
        """Which ranks have not failed together with this one, in an agreement of the group."""
        group: Any = self._cpu_group or dist.group.WORLD
        own, known = f"rank {self.rank} of {self.world_size}", range(self.world_size)
        try:
            default = distributed_c10d._get_default_store()
            store = distributed_c10d.PrefixStore(f"attnlib failed {group.group_name}", default)
            store.set(str(self.rank), "")
            with contextlib.suppress(RuntimeError):  # after the time
                store.wait([str(rank) for rank in known], _GRACE)
            missing = [rank for rank in known if not store.check([str(rank)])]
        except RuntimeError:
            return f"{own} reaches neither the others nor the process with their store"
        if not missing:
            return f"{own} or one that waited for it is later than the timeout"
        return f"ranks {missing} do not answer {own}"

    def agreed(
        self, agreement: str, name: str, attempt: Callable[[], tuple[object, Result]]
    ) -> Result:
        """What a function returns here, after no rank has raised and the facts of all are equal.

        Args:
            agreement: "never" returns or raises without asking the others.
            name: of what the ranks agree on.
            attempt: returns facts, which must be equal on all ranks, and a result. It neither sends
                nor writes.

        Raises:
            ContractError: see `agree`. With "never", whatever the function raises.
        """
        if agreement == "never":
            return attempt()[1]
        facts, results, error = None, [], None
        try:
            facts, result = attempt()
            results.append(result)
        except Exception as raised:  # of any kind: the other ranks wait
            error = raised
        self.agree((name, facts), error)
        return results[0]


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor in a form that every backend sends: gloo has no float8."""
    return tensor.view(-1).view(torch.uint8)


def _text(record: bytes) -> str:
    return record[33:].rstrip(b"\0").decode(errors="replace")
