"""Attention whose keys are divided among the ranks of a group, over torch.distributed.

In: a layer's spec, a process group and a division of positions. Out: layers and builders that an
engine calls on every rank. `docs/parallel.md` has the rules X1 to X10.
"""

from attnlib.parallel.addresses import local_block_table, local_slots, token_positions
from attnlib.parallel.attention import ParallelAttention
from attnlib.parallel.builder import ParallelBuilder
from attnlib.parallel.divisions import Contiguous, Division, Interleaved, ZigZag
from attnlib.parallel.exchange import ExchangeMethod, exchange_bytes
from attnlib.parallel.explain import explain_parallel
from attnlib.parallel.group import RankGroup
from attnlib.parallel.metadata import ParallelMetadata, divided_batch
from attnlib.parallel.prefill import ParallelPrefill
from attnlib.parallel.prefill_builder import PrefillBuilder
from attnlib.parallel.prefill_metadata import PrefillMetadata
from attnlib.parallel.warmup import warmup_parallel

__all__ = [
    "Contiguous",
    "Division",
    "ExchangeMethod",
    "Interleaved",
    "ParallelAttention",
    "ParallelBuilder",
    "ParallelMetadata",
    "ParallelPrefill",
    "PrefillBuilder",
    "PrefillMetadata",
    "RankGroup",
    "ZigZag",
    "divided_batch",
    "exchange_bytes",
    "explain_parallel",
    "local_block_table",
    "local_slots",
    "token_positions",
    "warmup_parallel",
]
