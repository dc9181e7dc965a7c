"""What the rest of `ops.triton` uses of the Hopper kernels; `hopper.load()` imports this module.

select_prefills  whether a prefill serves a call, and with which tile
select_decodes   whether a decode or a batch-invariant kernel serves a call, and with which tile
select_latents   whether the kernel over latents serves a call
decode_bounds    support, workspace and counters of layers, before there is a call
"""

from __future__ import annotations

from attnlib.ops.triton.hopper.decode_bounds import (
    decode_workspace_bytes,
    num_counters,
    shared_decode_shape,
    supports_decode,
)
from attnlib.ops.triton.hopper.select_decodes import (
    select_decode,
    select_invariant,
    select_packed_decode,
    select_shared_decode,
)
from attnlib.ops.triton.hopper.select_latents import run_packed_latents
from attnlib.ops.triton.hopper.select_prefills import (
    select_page_prefill,
    select_prefill,
    select_unpaged,
)
from attnlib.ops.triton.hopper.shared_decode_launches import SharedDecodeCall
from attnlib.ops.triton.hopper.tensor_support import unsupported_strides

__all__ = [
    "SharedDecodeCall",
    "decode_workspace_bytes",
    "num_counters",
    "run_packed_latents",
    "select_decode",
    "select_invariant",
    "select_packed_decode",
    "select_page_prefill",
    "select_prefill",
    "select_shared_decode",
    "select_unpaged",
    "shared_decode_shape",
    "supports_decode",
    "unsupported_strides",
]
