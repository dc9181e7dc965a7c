"""One builder on two CUDA streams: its workspace and counters are shared (ATTNLIB_VALIDATE=1).

Batches of one builder must run one after the other, on one stream or on streams that are ordered by
events. The check relies on the checks of values, which have waited for the current stream: work on
another stream that is ordered before this call is then complete. If it is not, nothing orders it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from attnlib.errors import ContractError

__all__ = ["check_stream"]

_SHARED = ("workspace", "counters", "scratch")
_MAX_TRACKED = 1024

_last_use: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
"""Address of a workspace or of counters -> stream of the last launches, and an event after them."""


def check_stream(batch: object, device: torch.device) -> Callable[[], None] | None:
    """Refuse a call whose workspace is in use on another stream.

    Args:
        batch: its metadata; `workspace`, `counters` and `scratch` are what batches of a
            builder share.
        device: a CUDA device, whose current stream the call uses.

    Returns:
        What to call after the launches; None if the batch shares nothing.

    Raises:
        ContractError: launches on another stream use the same memory and are not complete.
    """
    names = ("decode_metadata", "prefill_metadata")  # the parts of a composite have their own
    parts = [batch, *(getattr(batch, name, None) for name in names)]
    shared = [getattr(part, name, None) for part in parts for name in _SHARED]
    addresses = {x.untyped_storage().data_ptr() for x in shared if isinstance(x, torch.Tensor)}
    if not addresses:
        return None
    stream = torch.cuda.current_stream(device)
    for address in addresses:
        other, done = _last_use.get(address, (stream, None))
        if other != stream and done is not None and not done.query():
            raise ContractError(
                f"this batch runs on {stream}, but {other} still uses the workspace of its "
                "builder: make one builder per stream, or let this stream wait for the other one"
            )

    def launched() -> None:
        event = stream.record_event()
        for address in addresses:
            _last_use[address] = (stream, event)
            _last_use.move_to_end(address)
        while len(_last_use) > _MAX_TRACKED:
            _last_use.popitem(last=False)

    return launched
