"""Tiny models with state layers, and the tokens that transformers generates with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=512, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
    initializer_range=0.2, tie_word_embeddings=False,
)  # fmt: skip


def _qwen3_next() -> Any:
    """Three gated delta nets and one attention layer. vLLM asks for experts in one layer."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_SIZES, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, mlp_only_layers=[0, 1, 3],
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def _nemotron_h() -> Any:
    """Two Mamba2 layers and one attention layer. transformers bounds step sizes from below where
    vLLM does not: by nothing here."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **_SIZES, layers_block_type=["mamba", "attention", "mamba", "mlp"], mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, ssm_state_size=16, chunk_size=16, time_step_min=1e-30,
        pad_token_id=0,
    )  # fmt: skip
    return NemotronHForCausalLM(config)


MODELS = {"qwen3-next": _qwen3_next, "nemotron-h": _nemotron_h}


def write(folder: Path, prompts: list[list[int]], generate: Any) -> None:
    """The models and `expected.json` of each."""
    for name, make in MODELS.items():
        torch.manual_seed(9)
        model = make().eval().float()
        model.config._attn_implementation = "eager"
        model.save_pretrained(folder / name)
        rows = [generate(model, prompt, whole=True) for prompt in prompts]
        expected = {
            "prompts": prompts, "tokens": [tokens for tokens, _ in rows],
            "lead": min(lead for _, lead in rows),
        }  # fmt: skip
        (folder / name / "expected.json").write_text(json.dumps(expected))
        print(f"{name}: smallest lead {expected['lead']:.2g}")
