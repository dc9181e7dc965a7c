"""Tiny random models of many architectures, and functions to run them with two implementations.

Weights have a large variance and the output layer is not tied: with the initial weights of
transformers, or with tied ones, greedy tokens repeat and would not reveal a lost window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf

VOCABULARY = 64
WINDOW = 5

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_LAYERS = ["sliding_attention", "full_attention"]
_TEXT_SIZES: dict[str, Any] = {
    key: value
    for key, value in _SIZES.items()
    if key not in ("bos_token_id", "eos_token_id", "tie_word_embeddings")
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SIZES, head_dim=8)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_SIZES, sliding_window=WINDOW)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **_SIZES,
            head_dim=8,
            sliding_window=WINDOW,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=4,
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **_SIZES,
            head_dim=8,
            sliding_window=WINDOW,
            query_pre_attn_scalar=4,
            layer_types=_LAYERS,
        )
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_SIZES,
            head_dim=8,
            sliding_window=WINDOW,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=_LAYERS,
        )
    ),
}

_DECODERS_ONLY = ("num_key_value_heads", "bos_token_id", "eos_token_id", "tie_word_embeddings")
_ENCODER_SIZES = {key: value for key, value in _SIZES.items() if key not in _DECODERS_ONLY}

ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**_ENCODER_SIZES)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**_ENCODER_SIZES)),
    "albert": lambda: hf.AlbertModel(hf.AlbertConfig(**_ENCODER_SIZES)),
    "modernbert": lambda: hf.ModernBertModel(
        hf.ModernBertConfig(
            **_ENCODER_SIZES,
            local_attention=4,
            global_attn_every_n_layers=2,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        )
    ),
}

_PAIR_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def bart() -> Any:
    """An encoder-decoder: three types of attention in one model."""
    return randomized(
        hf.BartForConditionalGeneration(
            hf.BartConfig(**_PAIR_SIZES, max_position_embeddings=64, decoder_start_token_id=2)
        )
    )


def whisper() -> Any:
    """An encoder-decoder over audio features."""
    config = hf.WhisperConfig(
        **_PAIR_SIZES,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=32,
        decoder_start_token_id=3,
    )
    return randomized(hf.WhisperForConditionalGeneration(config))


_T5_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def t5() -> Any:
    """An encoder-decoder whose attention adds a bias per head."""
    return randomized(hf.T5ForConditionalGeneration(hf.T5Config(**_T5_SIZES)))


def umt5() -> Any:
    """Like T5, with the weights of a bias in every layer."""
    return randomized(hf.UMT5ForConditionalGeneration(hf.UMT5Config(**_T5_SIZES)))


def deepseek_v3() -> Any:
    """A decoder whose values are smaller than its keys."""
    config = hf.DeepseekV3Config(
        **{**_SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    return randomized(hf.DeepseekV3ForCausalLM(config))


def gemma3_with_images() -> Any:
    """A decoder with bidirectional attention among image tokens; token 60 is an image token."""
    text = {key: value for key, value in _SIZES.items() if key != "tie_word_embeddings"}
    config = hf.Gemma3Config(
        text_config={**text, "head_dim": 8, "sliding_window": WINDOW, "layer_types": _LAYERS},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    return randomized(hf.Gemma3ForConditionalGeneration(config))


def paligemma() -> Any:
    """A prefix language model: the image and the prompt are bidirectional; 60 is an image token."""
    text = {key: value for key, value in _SIZES.items() if key != "tie_word_embeddings"}
    config = hf.PaliGemmaConfig(
        text_config={**text, "model_type": "gemma", "head_dim": 8},
        vision_config={**_VISION, "patch_size": 8, "model_type": "siglip_vision_model"},
        image_token_index=60,
        projection_dim=text["hidden_size"],
    )
    return randomized(hf.PaliGemmaForConditionalGeneration(config))


def gemma4_with_images() -> Any:
    """A decoder with bidirectional attention among image tokens; token 60 is an image token."""
    text = {key: value for key, value in _SIZES.items() if key != "tie_word_embeddings"}
    config = hf.Gemma4Config(
        text_config={
            **text,
            "head_dim": 8,
            "global_head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": _LAYERS,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "use_bidirectional_attention": "vision",
            "num_kv_shared_layers": 0,
        },
        vision_config={
            **{k: _VISION[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")},
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
        audio_config=None,
        image_token_id=60,
        boi_token_id=61,
        eoi_token_id=62,
    )
    return randomized(hf.Gemma4ForConditionalGeneration(config))


def git() -> Any:
    """A decoder whose layers add the mask to the scores themselves."""
    sizes = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
    return randomized(hf.GitForCausalLM(hf.GitConfig(**sizes, vision_config=_VISION)))


def doge() -> Any:
    """A decoder that combines its mask with a learned one."""
    return randomized(hf.DogeForCausalLM(hf.DogeConfig(**_SIZES, head_dim=8)))


def gemma3n() -> Any:
    """A decoder with windows, whose last two layers read the keys and values of earlier layers."""
    layers = ["sliding_attention", "sliding_attention", "full_attention", *_LAYERS[:1] * 2]
    config = hf.Gemma3nTextConfig(
        **{**_SIZES, "num_hidden_layers": 6},
        head_dim=8,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        layer_types=[*layers, "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 6,
    )
    return randomized(hf.Gemma3nForCausalLM(config))


def gemma4_with_shared_layers() -> Any:
    """A decoder whose last two layers read the keys and values of earlier layers."""
    config = hf.Gemma4TextConfig(
        **{**_SIZES, "num_hidden_layers": 4},
        head_dim=8,
        global_head_dim=8,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        layer_types=_LAYERS * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    )
    return randomized(hf.Gemma4ForCausalLM(config))


def bigbird_pegasus() -> Any:
    """An encoder-decoder whose encoder adds the mask to the scores itself."""
    config = hf.BigBirdPegasusConfig(
        **_PAIR_SIZES, max_position_embeddings=64, attention_type="original_full"
    )
    return randomized(hf.BigBirdPegasusForConditionalGeneration(config))


def t5gemma2() -> Any:
    """An encoder-decoder whose decoder concatenates its mask with that of the encoder."""
    text = {key: value for key, value in _SIZES.items() if key != "tie_word_embeddings"}
    text |= {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _LAYERS}
    images = {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62}
    encoder = {"text_config": text, "vision_config": _VISION, "mm_tokens_per_image": 4, **images}
    config = hf.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=60)
    return randomized(hf.T5Gemma2ForConditionalGeneration(config))


def bridgetower() -> Any:
    """Two encoders, one mask row for all queries, and layers without a mask."""
    small = {"num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32}
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
    config = hf.BridgeTowerConfig(
        hidden_size=32,
        **small,
        text_config={**text, **small, "max_position_embeddings": 64},
        vision_config=vision,
    )
    return randomized(hf.BridgeTowerModel(config))


def qwen2_moe() -> Any:
    """A decoder whose sliding layers do not pass their window to the attention function."""
    config = hf.Qwen2MoeConfig(
        **_SIZES,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_LAYERS,
    )
    return randomized(hf.Qwen2MoeForCausalLM(config))


def stablelm() -> Any:
    """A decoder whose layers do not pass keyword arguments on."""
    return randomized(hf.StableLmForCausalLM(hf.StableLmConfig(**_SIZES)))


def nemotron() -> Any:
    """A decoder whose layers do not pass keyword arguments on."""
    return randomized(hf.NemotronForCausalLM(hf.NemotronConfig(**_SIZES, head_dim=8)))


def llama4(**fields: Any) -> Any:
    """A decoder whose chunk size of 6 appears only in its masks."""
    config = hf.Llama4TextConfig(
        **_TEXT_SIZES,
        head_dim=8,
        attention_chunk_size=6,
        num_local_experts=2,
        intermediate_size_mlp=48,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        **fields,
    )
    return randomized(hf.Llama4ForCausalLM(config))


def randomized(model: Any, seed: int = 1) -> Any:
    """The model in evaluation mode with wide random weights, float32."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (
            noise * 0.2 if parameter.dim() > 1 else parameter.data.float() + noise * 0.3
        )
    return model.eval()


def decoder(name: str) -> Any:
    """A decoder of `DECODERS`. Some of its initial weights stay, such as sinks: they are seeded, so
    that no router is undecided in one run of a thousand."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomized(DECODERS[name]())


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def padded(rows: Sequence[Sequence[int]], side: str) -> dict[str, torch.Tensor]:
    """A batch as a tokenizer pads it: `input_ids` and `attention_mask`, `[B, T]`."""
    longest = max(len(row) for row in rows)
    ids, mask = (
        torch.zeros(len(rows), longest, dtype=torch.long),
        torch.zeros(len(rows), longest, dtype=torch.long),
    )
    for index, row in enumerate(rows):
        where = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        ids[index, where], mask[index, where] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def run(model: Any, implementation: str, call: Callable[[Any], Any]) -> Any:
    """The result of `call(model)` with one attention implementation."""
    model.set_attn_implementation(implementation)
    for part in model.modules():  # transformers 5.17 leaves out parts with a copy of the config
        if isinstance(part, hf.PreTrainedModel) and type(part.config) is type(model.config):
            if part.config._attn_implementation != implementation:
                part.set_attn_implementation(implementation)
    return call(model)


def difference(
    model: Any, call: Callable[[Any], torch.Tensor], where: torch.Tensor | None = None
) -> float:
    """Largest difference between attnlib and eager at the positions where `where` is not 0."""
    error = (run(model, "attnlib", call) - run(model, "eager", call)).abs()
    return float(error.max() if where is None else error[where.bool()].max())


def generated(
    model: Any, implementation: str, batch: dict[str, torch.Tensor], tokens: int, **kwargs: Any
) -> torch.Tensor:
    """Greedy tokens, prompts included."""
    return run(
        model,
        implementation,
        lambda m: m.generate(**batch, max_new_tokens=tokens, do_sample=False, **kwargs),
    )
