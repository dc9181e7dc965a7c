"""What `attnlib compile --engine vllm` leaves out of the kernels of warm-ups inside vLLM.

    python tests/hosts/vllm_described.py

On a described H200. The last line is a JSON object: for each kind of layer the number of kernels
that the adapter's warm-up needs, the names of those that are not compiled, and how many notes it
reads, and those of them that are not written.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import recorded_adapter
import recorded_engine
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from attnlib.ahead_of_time import DescribedLayer, DescribedServer
from attnlib.ahead_of_time.described import run_described
from attnlib.device import resolve_device
from attnlib.integrations.vllm.mla_builder import AttnlibMLAMetadataBuilder
from attnlib.integrations.vllm.mla_impl import AttnlibMLAImpl
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.ops.triton.launch import notes
from attnlib.ops.triton.launch.described import Launches, described_gpu

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 100},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"kv_cache_dtype": "int8_per_token_head"},
}
"""Kind of layer -> its arguments."""
LATENTS = {"latents": "auto", "latents fp8": "fp8"}
"""Kind of layer over latents -> format of its cache."""
HEADS, LATENT, ROTARY, SIZE = 16, 512, 64, 128


def make_layer(kind: str) -> tuple[Any, Any, DescribedLayer]:
    """One layer, the builder of its group, and what `attnlib compile` is told of it."""
    layer, builder = recorded_adapter.make_layer(kind)
    spec = layer.impl.spec
    if spec.scales_in_page:
        content = 2 * PAGE_FORMATS[spec.kv_format.name].bytes_per_head(spec.head_size)
        shape = (4, spec.num_kv_heads, spec.block_size, content)
        layer.kv_cache = torch.zeros(shape, dtype=torch.uint8)
    return layer, builder, DescribedLayer(spec)


def make_latent_layer(kind: str) -> tuple[Any, Any, DescribedLayer]:
    """As `make_layer`."""
    weight = torch.zeros(HEADS * 2 * SIZE, LATENT)
    impl = AttnlibMLAImpl(
        num_heads=HEADS, head_size=LATENT + ROTARY, scale=0.1, num_kv_heads=1, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype=LATENTS[kind], logits_soft_cap=None,
        attn_type="decoder", kv_sharing_target_layer_name=None, q_lora_rank=None,
        kv_lora_rank=LATENT, qk_nope_head_dim=SIZE, qk_rope_head_dim=ROTARY,
        qk_head_dim=SIZE + ROTARY, v_head_dim=SIZE, indexer=None,
        kv_b_proj=SimpleNamespace(weight=weight, quant_method=None),
    )  # fmt: skip
    stored = torch.bfloat16 if LATENTS[kind] == "auto" else torch.uint8
    memory = torch.zeros(4, 64, LATENT + ROTARY, dtype=stored)
    layer = SimpleNamespace(
        impl=impl, kv_cache=memory, _k_scale=torch.ones((), dtype=torch.float32)
    )
    config = recorded_adapter.make_layer("plain")[1].vllm_config
    config.compilation_config.static_forward_context = {"layer": layer}
    config.parallel_config.prefill_context_parallel_size = 1
    spec, device = SimpleNamespace(block_size=64), torch.device("cpu")
    builder = AttnlibMLAMetadataBuilder(spec, ["layer"], config, device)
    return layer, builder, DescribedLayer(impl.spec, (SIZE, SIZE))


def left_out(kind: str) -> dict[str, Any]:
    """The kernels of one kind."""
    layer, builder, described = (make_latent_layer if kind in LATENTS else make_layer)(kind)
    server = DescribedServer(resolve_device("H200"), builder.limits, engine="vllm")
    needed: set[Any] = set()
    compiled: set[Any] = set()
    read: dict[str, Any] = {}
    written: dict[str, Any] = {}
    notes.write_note = read.__setitem__
    with described_gpu(server.chip(), lambda kernel, compile: needed.add(kernel), Launches()):
        layer.impl.group_warmup.run(between_batches=True)
    notes.write_note = written.__setitem__
    run_described(
        server, [described], lambda kernel, compile: compiled.add(kernel), writes_notes=True
    )
    return {
        "needed": len(needed),
        "left out": sorted(one.name for one in needed - compiled),
        "notes": len(read),
        "other notes": [facts for facts in read if written.get(facts) != read[facts]],
    }


if __name__ == "__main__":
    recorded_engine.serve_the_cpu()
    recorded_adapter.KINDS = KINDS
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        print(json.dumps({kind: left_out(kind) for kind in (*KINDS, *LATENTS)}))
