"""The kernels that a warm-up of the adapter leaves out, by recorded launches and random batches.

    python tests/hosts/recorded_adapter.py

Masks that depend on the batch, cross-attention, and decode context parallelism on one rank of two,
whose group repeats what it gathers. The last line is a JSON object: for each kind of layer the
kernels of the warm-up, the names of the kernels that batches needed besides, and how many functions
of attnlib the second layer of a decode step calls.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import recorded_engine
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

from attnlib.integrations.vllm import builder, context_parallel, impl
from attnlib.parallel.group import RankGroup
from tests.ops.triton.recorded_launches import recorded

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from call_trace import trace  # noqa: E402

HEADS, SIZE, BLOCK, COLUMNS = 8, 128, 16, 64
RANKS = 2
KINDS: dict[str, dict[str, Any]] = {
    "distributed": {},
    "distributed fp8": {"kv_cache_dtype": "fp8"},
    "distributed window": {"sliding_window": 100, "sinks": torch.zeros(HEADS)},
    "distributed window of 99": {"sliding_window": 99},
    "images": {"sliding_window": 100},
    "images clamped": {"sliding_window": 100},
    "drafts": {"sliding_window": 100},
    "retained": {"kv_cache_dtype": "fp8"},
    "alibi root": {"alibi_slopes": [0.1] * HEADS, "use_alibi_sqrt": True},
    "cross-attention": {"attn_type": "encoder_decoder"},
    "encoder": {"attn_type": "encoder_only"},
}
"""Kind of layer -> its arguments."""


class Group:
    """A group whose ranks have equal tensors."""

    world_size, rank = RANKS, 0
    agreed = RankGroup.agreed

    def check_device(self, device: torch.device) -> None:
        """Every device is right."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor] * RANKS)

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out.copy_(tensor)


def one_of(ranks: int) -> Any:
    """What vLLM's `AttentionImpl.__new__` does in a group."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls)
        made.dcp_world_size, made.dcp_rank = ranks, 0
        return made

    return new


def make_layer(kind: str) -> tuple[Any, Any]:
    """One layer, and the builder of its group."""
    impl.AttnlibImpl.__new__ = one_of(ranks := RANKS if "distributed" in kind else 1)
    attention = impl.AttnlibImpl(HEADS, SIZE, SIZE**-0.5, HEADS // 4, **KINDS[kind])
    stored = torch.uint8 if "kv_cache_dtype" in KINDS[kind] else torch.bfloat16
    memory = torch.zeros(4, BLOCK, HEADS // 4, 2 * SIZE, dtype=stored).permute(0, 2, 1, 3)
    one = torch.ones(1, dtype=torch.float32)
    layer = SimpleNamespace(
        impl=attention, kv_cache=memory, _k_scale=one, _v_scale=one,
        mm_prefix_clamp_sliding_window="clamped" in kind,
    )  # fmt: skip
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512),
        model_config=SimpleNamespace(
            max_model_len=1024, enforce_eager=False, is_mm_prefix_lm="images" in kind,
            rswa_window=50 if kind == "retained" else None,
        ),
        attention_config=SimpleNamespace(use_non_causal=kind == "drafts"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=1
        ),
        speculative_config=None,
    )  # fmt: skip
    spec = SimpleNamespace(block_size=BLOCK)
    return layer, builder.AttnlibMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def fields_of(kind: str, draw: random.Random, seq_lens: list[int]) -> dict[str, Any]:
    """What vLLM says of a batch besides its lengths."""
    if "images" in kind:
        return {"mm_req_doc_ranges": {draw.randrange(len(seq_lens)): [(3, seq_lens[0] // 2 + 4)]}}
    if kind == "drafts":
        flags = torch.tensor([draw.randint(0, 1) for _ in seq_lens], dtype=torch.int32)
        return {"causal": draw.choice((True, False, flags))}
    if kind == "retained":
        return {"rswa_prefix_lens": torch.tensor(seq_lens) // 2}
    return {"causal": False} if kind in ("cross-attention", "encoder") else {}


def step(
    layer: Any, group_builder: Any, query_lens: list[int], seq_lens: list[int], **fields: Any
) -> Callable[[], object]:
    """One batch; what the next layer of the group calls over it."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lengths, tokens = torch.tensor(seq_lens, dtype=torch.int32), sum(query_lens)
    slots = torch.full((tokens,), -1)
    batch = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths,
        num_reqs=len(seq_lens), num_actual_tokens=tokens, max_query_len=max(query_lens),
        max_seq_len=max(seq_lens), slot_mapping=slots,
        block_table_tensor=torch.zeros(len(seq_lens), COLUMNS, dtype=torch.int32),
        seq_lens_cpu_upper_bound=lengths, dcp_local_seq_lens=(lengths + 1) // RANKS, **fields,
    )  # fmt: skip
    sizes = [HEADS * SIZE, *[HEADS // 4 * SIZE] * 2]
    fused = torch.zeros(tokens, sum(sizes), dtype=torch.bfloat16)
    q, k, v = (part.unflatten(1, (-1, SIZE)) for part in fused.split(sizes, 1))
    output = torch.zeros(tokens, HEADS, SIZE, dtype=torch.bfloat16)
    metadata = group_builder.build(0, batch)
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
    layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output)
    return lambda: layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output)


def late_kernels(kind: str) -> dict[str, Any]:
    """The kernels of 100 random batches that the warm-up has not run."""
    layer, group_builder = make_layer(kind)
    recorded_engine.WARMED.clear()
    layer.impl.group_warmup.run(between_batches=True)
    warmed, draw = set(recorded_engine.WARMED), random.Random(0)
    served: set[str] = set()
    for _ in range(100):
        count = draw.choice((1, 2, 3, 8))
        longest = draw.choice((1, 1, 2, 17, 60))
        queries = [draw.randint(1, longest) for _ in range(count)]
        context = (0,) if kind == "encoder" else (0, 5, 100, 900)
        lengths = [query + draw.choice(context) for query in queries]
        fields = fields_of(kind, draw, lengths)
        launches = recorded(
            lambda q=queries, s=lengths, f=fields: step(layer, group_builder, q, s, **f)
        )[0]
        served |= {record.kernel for record in launches}
    late = sorted(kernel.split()[0] for kernel in served - warmed)
    fields = fields_of(kind, draw, [9, 9])
    for _ in range(3):
        repeat = step(layer, group_builder, [1, 1], [9, 9], **fields)
    calls = trace(repeat)[1]
    return {"warmed": len(warmed), "served": len(served), "late": late, "calls": calls}


if __name__ == "__main__":
    recorded_engine.serve_the_cpu()
    context_parallel.rank_group = Group
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        print(json.dumps({kind: late_kernels(kind) for kind in KINDS}))
