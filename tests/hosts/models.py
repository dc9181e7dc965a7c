"""Tiny models with seeded weights on disk, and the tokens that transformers generates with them.

    python tests/hosts/models.py FOLDER
    python tests/hosts/models.py FOLDER llama gemma2     # only these decoders, and plain tokens

Run in the environment of the hosts (`install.py`), so that both sides have one transformers.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attnlib.kv_dtype import PAGE_FORMATS
from tests.hosts import drafts, media_models, selected_keys, state_models

NEW_TOKENS = 24
STORED_TOKENS = 16
"""New tokens over caches with formats."""
SPAN = 3, 20
"""First and last position of tokens that see each other, as those of an image do."""
PROMPT_LENGTHS = (5, 17, 64, 130, 1, 40)
WINDOW = 48

SIZES: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=1024,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, initializer_range=0.2, tie_word_embeddings=False)
    return LlamaForCausalLM(config)


def _loops() -> Any:
    """Small weights: it soon repeats itself, so that n-gram speculation is accepted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, initializer_range=0.05, tie_word_embeddings=False)
    return LlamaForCausalLM(config)


def _mqa() -> Any:
    """One KV head, as decode context parallelism needs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SIZES, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2, tie_word_embeddings=False))


def _mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        **SIZES, initializer_range=0.2, tie_word_embeddings=False, sliding_window=WINDOW
    )
    return MistralForCausalLM(config)


def _gemma2(kv_heads: int = 2) -> Any:
    """Soft cap, and windows in every second layer. With freshly initialized weights its tied
    embedding makes it repeat the last token; large norm weights behind each block prevent that."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **{**SIZES, "num_key_value_heads": kv_heads}, initializer_range=0.1,
        sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    )  # fmt: skip
    return with_large_norms(Gemma2ForCausalLM(config))


def with_large_norms(model: Any) -> Any:
    for name, module in model.named_modules():
        if "post_" in name:
            module.weight.data.normal_(0, 16.0)
    return model


def _gemma3() -> Any:
    """Norms of queries and keys, and windows in all layers but one."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **SIZES, initializer_range=0.1, sliding_window=WINDOW, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention",
                     "sliding_attention"],
    )  # fmt: skip
    return with_large_norms(Gemma3ForCausalLM(config))


def _qwen3() -> Any:
    """Norms of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, initializer_range=0.2, tie_word_embeddings=False))


def _deepseek() -> Any:
    """Latent attention, without experts. The sizes of a head are DeepSeek's, because vLLM refuses
    others on a GPU."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    layers = SIZES["num_hidden_layers"]
    config = DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 8, "head_dim": 64}, initializer_range=0.1,
        tie_word_embeddings=False, q_lora_rank=48, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=layers, n_routed_experts=8,
        n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=64,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=512, max_position_embeddings=256, initializer_range=0.2,
        )
    )  # fmt: skip


DECODERS = {
    "llama": _llama, "mistral": _mistral, "gemma2": _gemma2, "loops": _loops, "mqa": _mqa,
    "gemma2-mqa": lambda: _gemma2(1), "deepseek": _deepseek, "gemma3": _gemma3, "qwen3": _qwen3,
    "deepseek-v32": _deepseek,
}  # fmt: skip


WITH_SPANS = ("llama", "mistral")
WITH_PAGES = "llama"
SELECTING = "deepseek-v32"
ROTATED = "nvfp4+hadamard"
STORED = (
    *PAGE_FORMATS, ROTATED, "int8_per_token_head,example:rotated4+hadamard",
    "float32,int8_per_token_head+hadamard",
)  # fmt: skip
"""How caches store heads: names of formats, of those of keys and values, of rotated ones.
Tokens over these do not depend on the last bits of keys and values."""


def _save_tokenizer(folder: Path) -> None:
    """One word per id. vLLM's pooling models need a tokenizer, although prompts are ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(512)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def prompts() -> list[list[int]]:
    """Token ids; the last prompt shares 96 tokens with the fourth."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return [*rows, [*rows[3][:96], 7, 8, 9]]


def span_mask(tokens: int, window: int | None) -> torch.Tensor:
    """Causal attention within a window, and the tokens of `SPAN` see each other; `[1, 1, T, T]`."""
    position = torch.arange(tokens)
    distance = position[:, None] - position
    inside = (position >= SPAN[0]) & (position <= SPAN[1])
    seen = (distance >= 0) & (distance < (window or tokens)) | (inside[:, None] & inside)
    return torch.zeros(1, 1, tokens, tokens).masked_fill(~seen, torch.finfo(torch.float32).min)


@torch.no_grad()
def generate(
    model: Any,
    prompt: list[int],
    mask: Callable[[int], torch.Tensor] | None = None,
    whole: bool = False,
) -> tuple[list[int], float]:
    """Greedy tokens, and the smallest lead of a chosen logit; by full forward passes if `whole` or
    with a mask, else over transformers' cache.

    Args:
        model: of transformers.
        prompt: ids.
        mask: makes a mask for a number of tokens; None for that of the model.
        whole: whether there is no cache.
    """
    ids, lead, cache = list(prompt), float("inf"), None
    whole = whole or mask is not None
    for _ in range(NEW_TOKENS):
        given = None if mask is None else mask(len(ids))
        new = torch.tensor([ids if cache is None else ids[-1:]])
        out = model(new, attention_mask=given, past_key_values=cache, use_cache=not whole)
        cache, logits = getattr(out, "past_key_values", None), out.logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        lead = min(lead, first - second)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], lead


def page_tokens(model: Any, prompt: list[int], name: str, but: int | None = None) -> list[int]:
    """Greedy tokens over a cache that holds what pages give back of (rotated) heads, but in layer
    `but` keys and values as they are."""
    from transformers import DynamicCache

    from attnlib.testing.kv_rotation import rotate_reference
    from attnlib.testing.page_formats import dequantize_tokens, quantize_tokens

    sides, _, rotation = name.partition("+")
    formats = dict(zip(("keys", "values"), (sides.split(",") * 2)[:2], strict=True))

    def stored(states: torch.Tensor, side: str) -> torch.Tensor:
        if formats[side] == "float32":
            return states
        tokens = rotate_reference(states[0].transpose(0, 1), rotation or None, side)  # [T, H, D]
        name = formats[side]
        found = dequantize_tokens(*quantize_tokens(tokens, name), name).to(states.dtype)
        found = rotate_reference(found, rotation or None, side, inverse=True)
        return found.transpose(0, 1)[None]

    class Cache(DynamicCache):
        def update(
            self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **more: Any
        ) -> Any:
            if layer != but:
                keys, values = stored(keys, "keys"), stored(values, "values")
            return super().update(keys, values, layer, *args, **more)

    new, found, cache = list(prompt), list[int](), Cache()
    for _ in range(STORED_TOKENS):
        out = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
        new = [int(out.logits[0, -1].argmax())]
        found += new
    return found


def write(folder: Path, names: Sequence[str] = ()) -> None:
    """All decoders and `expected.json` of each.

    Args:
        folder: gets a folder for each model.
        names: of the decoders to write, whose tokens have no formats and no spans; all if empty.
    """
    for name in names or DECODERS:
        torch.manual_seed(3)
        model = DECODERS[name]().eval().float()
        model.config._attn_implementation = "eager"
        model.save_pretrained(folder / name)
        seen_keys = selected_keys.mask if name == SELECTING else None
        rows = [generate(model, prompt, seen_keys) for prompt in prompts()]
        expected = {
            "prompts": prompts(), "tokens": [tokens for tokens, _ in rows],
            "lead": min(lead for _, lead in rows),
        }  # fmt: skip
        if name == WITH_PAGES and not names:
            expected["page_tokens"] = {
                stored: [page_tokens(model, prompt, stored) for prompt in prompts()]
                for stored in STORED
            }
            expected["tokens_but_layer_1"] = [
                page_tokens(model, prompt, next(iter(PAGE_FORMATS)), but=1) for prompt in prompts()
            ]
        if name in WITH_SPANS and not names:
            long = [prompt for prompt in prompts() if len(prompt) > SPAN[1] + 1]
            window = getattr(model.config, "sliding_window", None)
            seen = functools.partial(span_mask, window=window)
            with_span = [generate(model, prompt, seen)[0] for prompt in long]
            expected |= {"span_prompts": long, "span_tokens": with_span}
        if name == SELECTING:
            selected_keys.write(folder / name)
        (folder / name / "expected.json").write_text(json.dumps(expected))
        distinct = [len(set(tokens)) for tokens, _ in rows]
        print(
            f"{name}: {distinct} distinct tokens per prompt, smallest lead {expected['lead']:.2g}"
        )


def _write_encoder(folder: Path) -> None:
    torch.manual_seed(3)
    encoder = _bert().eval().float()
    encoder.config._attn_implementation = "eager"
    encoder.save_pretrained(folder / "bert")
    _save_tokenizer(folder / "bert")
    with torch.no_grad():
        states = [encoder(torch.tensor([p])).last_hidden_state[0, 0].tolist() for p in prompts()]
    (folder / "bert" / "expected.json").write_text(
        json.dumps({"prompts": prompts(), "states": states})
    )


def main(folder: Path, names: Sequence[str]) -> None:
    """Write the named decoders, or everything."""
    write(folder, names)
    if names:
        return
    _write_encoder(folder)
    media_models.write(folder)
    state_models.write(folder, prompts(), generate)
    drafts.write(folder / "qwen3-drafts", SIZES)
    drafts.write_noisy(folder / "llama", folder / "llama-drafts")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
