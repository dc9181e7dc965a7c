"""vLLM's engine on this CPU, whose ranks exchange by memory, as on GPUs; as `run_engine.py`.

    TRITON_INTERPRET=1 TEST_SHARED=DIR python tests/hosts/vllm_by_memory.py CASES.json RESULT.json

Every worker leaves a file in DIR, which is named after its rank and says how often it has exchanged
queries and results. Workers run the top of this file again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import run_engine
import torch

from attnlib.ops.dispatch import operation
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.triton.kernels import peer_words
from attnlib.parallel import RankGroup, exchange, setup_checks
from tests.parallel.peer_cases import by_memory, shared_buffers, yielding

FOUND: dict[int, PeerBuffers] = {}
"""By rank; a worker has one."""


def peers(group: RankGroup, device: torch.device) -> PeerBuffers:
    if group.rank not in FOUND:
        FOUND[group.rank] = shared_buffers(group)
    return FOUND[group.rank]


def chosen(module: str, name: str, like: Any) -> Any:
    return by_memory(module, name) if module == "peer_words" else operation(module, name, like)


def counted(*arguments: Any, **more: Any) -> None:
    combine(*arguments, **more)
    for rank, buffers in FOUND.items():
        counts = (int(x.max()) for x in (buffers.share_counts, buffers.merge_counts))
        Path(os.environ["TEST_SHARED"], str(rank)).write_text(" ".join(map(str, counts)))


combine = exchange.Exchange.combine
setattr(exchange.Exchange, "combine", counted)  # noqa: B010
setattr(RankGroup, "peers", peers)  # noqa: B010
setattr(exchange, "operation", chosen)  # noqa: B010
setattr(setup_checks, "tries_memory", lambda *_: True)  # noqa: B010
setattr(peer_words, "_late", yielding(peer_words._late))  # noqa: B010

if __name__ == "__main__":
    run_engine.main(Path(sys.argv[1]), Path(sys.argv[2]))
