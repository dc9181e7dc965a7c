"""Serve random batches on an H100 that is described: Triton itself finds or compiles each kernel.

    ATTNLIB_KERNELS=FOLDER TRITON_CACHE_DIR=EMPTY python -m tests.described_server

`FOLDER` is one of `attnlib compile ARGUMENTS`. Triton runs as on a GPU, with a driver that loads
and launches nothing: it looks every kernel up in its cache on disk, which is empty but for what
ATTNLIB_KERNELS adds. The last line is a JSON object: for each step the names of the kernels that
Triton found, and of those that it compiled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from attnlib.backends.triton.described import DescribedTritonBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.triton import slots
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of_cpu
from attnlib.ops.triton.launch.compilations import compiled_kernels
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

LIMITS = BatchLimits(max_num_reqs=3, max_num_tokens=24, max_seq_len=96)
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, block_size=16)
ARGUMENTS = [
    *("--num-heads", "4", "--num-kv-heads", "2", "--head-size", "64"),
    *("--max-num-reqs", "3", "--max-num-tokens", "24", "--max-seq-len", "96"),
]
"""The same for `attnlib compile`."""
H100 = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)


class Utils:
    """Of a driver whose device holds every kernel."""

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": H100.shared_memory}

    def load_binary(self, name: str, binary: bytes, shared: int, device: Any) -> tuple[Any, ...]:
        assert binary.startswith(b"\x7fELF")
        return None, 1, 64, 0, 1024

    def unload_module(self, module: Any) -> None:
        raise AssertionError("nothing was loaded")


class Driver:
    """Of an H100 on which nothing is launched."""

    utils = Utils()

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def batch_of(draw: random.Random) -> CommonAttentionMetadata:
    """Decodes, verification steps, prefills and mixtures within the limits."""
    queries = [draw.choice((1, 1, 2, 8)) for _ in range(draw.randint(0, 2))]
    left = LIMITS.max_num_tokens - sum(queries)
    if not queries or (left > 9 and draw.random() < 0.6):
        queries.append(draw.randint(9, left) if left > 9 else 1)
    lengths = [min(query + draw.choice((0, 5, 60)), LIMITS.max_seq_len) for query in queries]
    table = torch.zeros(len(queries), LIMITS.max_seq_len // SPEC.block_size, dtype=torch.int32)
    return CommonAttentionMetadata.from_lengths(queries, lengths, table, SPEC.block_size, "cpu")


class Server:
    """One layer, its cache and its builder."""

    def __init__(self) -> None:
        self.layer = Attention(SPEC, backend=DescribedTritonBackend, device="cpu")
        self.cache = PagedKVCache.allocate(SPEC, 40, "cpu")
        self.builder = self.layer.backend.make_builder(SPEC, torch.device("cpu"), limits=LIMITS)

    def step(self, common: CommonAttentionMetadata, offset: int = 0) -> None:
        """One batch; its queries start `offset` elements behind a boundary of 64 bytes."""
        sizes = [SPEC.num_heads * SPEC.head_size, *[SPEC.num_kv_heads * SPEC.head_size] * 2]
        tokens = common.num_actual_tokens
        rows = torch.zeros(offset + tokens * sum(sizes), dtype=SPEC.dtype)[offset:]
        query, key, value = rows.view(tokens, -1).split(sizes, dim=1)
        self.layer(query, key, value, self.cache, self.builder.build(0, common))
        assert common.block_table_tensor is not None
        slots.compute_slot_mapping(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, 16, tokens
        )


def main() -> None:
    """Serve, then make launches that the folder has no kernels for."""
    draw = random.Random(0)
    triton.runtime.driver.set_active(Driver())
    result: dict[str, dict[str, list[str]]] = {}

    def noted(step: str, serve: Callable[[], None]) -> None:
        with compiled_kernels() as new:
            serve()
        result[step] = {
            "found": sorted(kernel.name for kernel in new if kernel.is_found),
            "compiled": sorted(kernel.name for kernel in new if not kernel.is_found),
        }

    def random_batches() -> None:
        server = Server()
        for _ in range(80):
            server.step(batch_of(draw))

    def unaligned() -> None:
        table = torch.zeros(1, 6, dtype=torch.int32)
        common = CommonAttentionMetadata.from_lengths([1], [1], table, SPEC.block_size, "cpu")
        Server().step(common, offset=1)

    with limits_of_cpu(H100), torch.no_grad():
        noted("random batches", random_batches)
        noted("unaligned", unaligned)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
