"""Layers of the adapter on two ranks with gloo against the same layers on one.

    python tests/hosts/vllm_divided.py

Every rank has query heads of its own; the keys are divided as vLLM does, which writes each rank's
share by a slot mapping of its own. The last line is a JSON object: the case, and what each rank
found wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import vllm_adapter
import vllm_latent_adapter
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm import context_parallel
from attnlib.integrations.vllm.impl import AttnlibImpl
from attnlib.integrations.vllm.mla_impl import AttnlibMLAImpl
from attnlib.parallel import Interleaved, RankGroup, local_slots, token_positions
from tests.parallel.workers import run_ranks

RANKS, LIMIT, BLOCK, RUN = 2, 5e-6, 16, 4
STEPS = [([40, 9], [40, 9]), ([1, 1], [41, 10]), ([1, 20], [42, 30]), ([4, 4], [46, 34])]
DENSE: dict[str, dict[str, Any]] = {
    "dense": {},
    "fp8": {"kv_cache_dtype": "fp8"},
    "window of whole periods": {"sliding_window": 8},
    "window": {"sliding_window": 7},
    "sinks": {"sinks": torch.linspace(-1, 1, vllm_adapter.HEADS)},
    "alibi": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
    "soft cap": {"logits_soft_cap": 2.0},
    "window, sinks, fp8": {
        "kv_cache_dtype": "fp8", "sliding_window": 7, "logits_soft_cap": 2.0,
        "sinks": torch.linspace(-1, 1, vllm_adapter.HEADS),
    },
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "layers that share a cache": {"kv_sharing_target_layer_name": "layer"},
    "pages with scales": {"kv_cache_dtype": "int8_per_token_head"},
}
LATENT: dict[str, dict[str, Any]] = {"latents": {}, "latents in fp8": {"kv_cache_dtype": "fp8"}}


def rank_of(group: RankGroup) -> Any:
    """What vLLM's `__new__` of an impl does on a rank of a group."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls)
        made.dcp_world_size, made.dcp_rank = group.world_size, group.rank
        return made

    return new


def make(kind: Any, group: RankGroup, module: Any, **arguments: Any) -> tuple[Any, Any]:
    """A layer over all keys, and one over this rank's, with equal weights."""
    torch.manual_seed(3 + group.rank)  # weights of a latent layer are those of this rank's heads
    whole = module.Layer(**arguments)
    torch.manual_seed(3 + group.rank)
    with (
        mock.patch.object(kind, "__new__", rank_of(group)),
        mock.patch.object(context_parallel, "rank_group", lambda: group),
    ):
        return whole, module.Layer(**arguments)


def batch_of(lengths: tuple[list[int], list[int]], group: RankGroup | None) -> Any:
    """vLLM's batch, with the slots of a rank or of one process."""
    query_lens, seq_lens = lengths
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    table = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
    lens, tokens = torch.tensor(seq_lens, dtype=torch.int32), sum(query_lens)
    division = Interleaved(group.world_size) if group else Interleaved(1)
    where = token_positions(starts, lens, tokens)
    slots = local_slots(division, group.rank if group else 0, where, table, BLOCK)
    sizes = tokens, max(query_lens), max(seq_lens)
    return vllm_adapter.vllm_batch(starts, lens, *sizes, table, slots)


def dense(arguments: dict[str, Any], group: RankGroup) -> str:
    layers = make(AttnlibImpl, group, vllm_adapter, **arguments)
    random = torch.Generator().manual_seed(5)
    for lengths in STEPS:
        tokens = sum(lengths[0])
        shared = torch.Generator().manual_seed(tokens)
        random.manual_seed(group.rank)
        q = torch.randn(tokens, vllm_adapter.HEADS, vllm_adapter.SIZE, generator=random)
        k, v = (
            torch.randn(tokens, vllm_adapter.KV_HEADS, vllm_adapter.SIZE, generator=shared)
            for _ in range(2)
        )
        outputs = []
        for layer, ranks in zip(layers, (None, group), strict=True):
            batch = batch_of(lengths, ranks)
            metadata, output = layer.builder.build(0, batch), torch.empty_like(q)
            slots = batch.slot_mapping
            layer.impl.do_kv_cache_update(layer.layer, k, v, layer.kv_cache, slots)
            layer.impl.forward(layer.layer, q, k, v, layer.kv_cache, metadata, output)
            outputs.append(output)
        if (error := float((outputs[0] - outputs[1]).abs().max())) > LIMIT:
            return f"{lengths}: error {error}"
    return ""


def combined(group: RankGroup, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """What vLLM does with the results of the ranks, for this rank's heads."""
    outs, lses = group.all_gather(out), group.all_gather(lse)
    weights = (lses - lses.logsumexp(0)).exp().unsqueeze(-1)
    heads = slice(group.rank * vllm_latent_adapter.HEADS, None)
    total = torch.where(weights == 0, 0, outs * weights).sum(0)
    return total[:, heads][:, : vllm_latent_adapter.HEADS]


def latent(arguments: dict[str, Any], group: RankGroup) -> str:
    layers = make(AttnlibMLAImpl, group, vllm_latent_adapter, **arguments)
    sizes, random = vllm_latent_adapter, torch.Generator()
    for lengths in STEPS:
        tokens = sum(lengths[0])
        shared = torch.Generator().manual_seed(tokens)
        random.manual_seed(group.rank)
        q = torch.randn(tokens, sizes.HEADS, sizes.KEY + sizes.ROTARY, generator=random)
        latents = torch.randn(tokens, sizes.LATENT, generator=shared)
        rotary = torch.randn(tokens, 1, sizes.ROTARY, generator=shared)
        outputs = []
        for layer, ranks in zip(layers, (None, group), strict=True):
            impl, batch, scale = layer.impl, batch_of(lengths, ranks), layer.layer._k_scale
            metadata, decodes = layer.builder.build(0, batch), 0
            decodes = metadata.num_decode_tokens
            memory, kind = layer.kv_cache, impl.kv_cache_dtype
            impl.do_kv_cache_update(latents, rotary, memory, batch.slot_mapping, kind, scale)
            output = torch.zeros(tokens, sizes.HEADS * sizes.VALUE)
            new = slice(decodes, None)
            if decodes < tokens:
                rest = (q[new], latents[new], rotary[new], memory, metadata, scale)
                impl.forward_mha(*rest, output=output[new])
            if decodes:
                impl._prefills = impl._prefills or impl._prefill_layer()
                query = impl._prefills.absorb(q[:decodes])
                if ranks is not None:
                    query = torch.cat(list(group.all_gather(query)), 1)
                found, lse = impl.forward_mqa(query, memory, metadata, layer.layer)
                if ranks is not None:
                    found = combined(group, found, lse)
                output[:decodes] = impl._prefills.project(found).flatten(1)
            outputs.append(output)
        if (error := float((outputs[0] - outputs[1]).abs().max())) > LIMIT:
            return f"{lengths}: error {error}"
    return ""


def refused(reason: str, group: RankGroup) -> str:
    """What the adapter cannot divide names decode context parallelism and the reason."""
    try:
        make(AttnlibImpl, group, vllm_adapter, **REFUSED[reason])
    except UnsupportedConfigError as error:
        text = str(error)
        return "" if "decode context parallelism" in text and reason in text else text
    return "was not refused"


def configured(case: Callable[[RankGroup], str], group: RankGroup) -> str:
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        torch.set_default_dtype(torch.float32)
        return case(group)


def in_runs(case: Callable[[RankGroup], str], group: RankGroup) -> str:
    """Under `cp_kv_cache_interleave_size`: ranks have runs of positions in turn."""
    config = get_current_vllm_config().parallel_config
    with (
        mock.patch.object(config, "cp_kv_cache_interleave_size", RUN),
        mock.patch(f"{__name__}.Interleaved", partial(Interleaved, run=RUN)),
    ):
        return case(group)


CASES: dict[str, Any] = {
    **{name: partial(configured, partial(dense, given)) for name, given in DENSE.items()},
    **{name: partial(configured, partial(latent, given)) for name, given in LATENT.items()},
    "runs of positions": partial(configured, partial(in_runs, partial(dense, DENSE["window"]))),
    **{f"refused: {name}": partial(configured, partial(refused, name)) for name in REFUSED},
}

if __name__ == "__main__":
    run_ranks("vllm_divided", list(CASES), RANKS)
