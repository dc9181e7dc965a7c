"""Tiny models that hear or see, with seeded weights, and the tokens of transformers (eager).

Whisper attends to what its encoder heard. In Gemma 3 the tokens of an image see each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

NEW_TOKENS = 24
RATE = 16_000
"""Samples of audio per second."""
SIDE = 28
"""Pixels of an image in each direction; 16 patches."""
BEGIN, END, IMAGE, BREAK = 500, 501, 502, 4
"""Token ids around an image, of its patches, and of an empty line."""

HEARD = {0: [3, 10, 11, 12], 1: [3, 10, 11, 12], 2: [3, *range(20, 32)]}
"""Seed of the audio -> prompt of the decoder."""
SEEN: list[tuple[list[int], list[int]]] = [
    ([0], [10, 11, 12, 13, BEGIN, 14]), ([1], [10, 11, 12, 13, BEGIN, 14]),
    ([2, 3], [*range(40, 100), BEGIN, 30, 31, 32, BEGIN, 33, 34]), ([], [90, 91, 92, 93, 94]),
]  # fmt: skip
"""Seeds of the images and prompts, in which each image is one token."""


def audio(seed: int) -> np.ndarray:
    """Less than a second of noise."""
    samples = 9_000 + 3_000 * seed
    return (np.random.default_rng(seed).standard_normal(samples) * 0.3).astype(np.float32)


def image(seed: int) -> Any:
    """An image of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def given(model: str) -> list[dict[str, Any]]:
    """The prompts of a model for vLLM."""
    if model == "whisper":
        return [
            {
                "encoder_prompt": {
                    "prompt": "", "multi_modal_data": {"audio": (audio(seed), RATE)},
                },
                "decoder_prompt": {"prompt_token_ids": prompt},
            }
            for seed, prompt in HEARD.items()
        ]  # fmt: skip
    return [
        {"prompt_token_ids": prompt, "multi_modal_data": {"image": [image(s) for s in seeds]}}
        if seeds else {"prompt_token_ids": prompt}
        for seeds, prompt in SEEN
    ]  # fmt: skip


def _greedy(step: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(step(ids).argmax()))
    return ids[len(prompt) :]


def _whisper(folder: Path) -> dict[str, Any]:
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    config = WhisperConfig(
        vocab_size=512, num_mel_bins=80, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
        decoder_ffn_dim=256, d_model=128, max_source_positions=50, max_target_positions=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        begin_suppress_tokens=None, suppress_tokens=None, init_std=0.2,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval().float()
    model.config._attn_implementation = "eager"
    model.save_pretrained(folder)
    special = {2: "<|endoftext|>", 3: "<|startoftranscript|>"}
    words = {special.get(index, f"w{index}"): index for index in range(512)}
    extractor = WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    tokenizer = WhisperTokenizer(vocab=words, merges=[])
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    rows = []
    for seed, prompt in HEARD.items():
        heard = extractor(audio(seed), sampling_rate=RATE, return_tensors="pt").input_features

        def step(ids: list[int], heard: torch.Tensor = heard) -> torch.Tensor:
            out = model(input_features=heard, decoder_input_ids=torch.tensor([ids]))
            return out.logits[0, -1]  # type: ignore[no-any-return]

        rows.append(_greedy(step, prompt))
    return {"tokens": rows}


def _gemma3(folder: Path) -> dict[str, Any]:
    """Layers with windows and one without."""
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    from tests.hosts.models import SIZES, WINDOW, with_large_norms

    windows = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    text = Gemma3TextConfig(
        **SIZES, initializer_range=0.1, sliding_window=WINDOW, query_pre_attn_scalar=32,
        layer_types=windows,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        image_size=SIDE, patch_size=SIDE // 4, vision_use_head=False,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=16, boi_token_index=BEGIN,
        eoi_token_index=END, image_token_index=IMAGE,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval().float()
    with_large_norms(model.model.language_model)
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(0, 0.3)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    _name_weights_as_published(folder / "model.safetensors")
    processor = _save_gemma3_processor(folder)

    def tokens(seeds: list[int], prompt: list[int], spans: bool) -> list[int]:
        shown = [BREAK, BEGIN, *[IMAGE] * 16, END, BREAK]
        ids = [new for old in prompt for new in (shown if old == BEGIN else [old])]
        more = {}
        if seeds:
            pixels = processor([image(seed) for seed in seeds], return_tensors="pt")
            more["pixel_values"] = pixels["pixel_values"]

        def step(ids: list[int]) -> torch.Tensor:
            row = torch.tensor([ids])
            kinds = (row == IMAGE).long() * spans
            # A cut prompt has no tokens of generated images.
            out = model(
                input_ids=row, token_type_ids=kinds, attention_mask=torch.ones_like(row), **more
            )
            return out.logits[0, -1]  # type: ignore[no-any-return]

        return _greedy(step, ids)

    return {
        "tokens": [tokens(*row, spans=True) for row in SEEN],
        "causal_tokens": [tokens(*row, spans=False) for row in SEEN],
    }


def _name_weights_as_published(file: Path) -> None:
    """Transformers 5 drops a part of the names that checkpoints have and vLLM reads."""
    from safetensors.torch import load_file, save_file

    short, long = "vision_tower.", "vision_tower.vision_model."
    weights = {
        name if long in name else name.replace(short, long): weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


def _save_gemma3_processor(folder: Path) -> Any:
    from tokenizers import Regex, Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named = {"<boi>": BEGIN, "<eoi>": END, "<img>": IMAGE}
    named |= {"\n" * lines: BREAK - 2 + lines for lines in range(1, 5)}
    words = {f"w{index}": index for index in range(512) if index not in named.values()}
    words_only = Tokenizer(WordLevel(words | named, unk_token="w0"))
    words_only.pre_tokenizer = pre_tokenizers.Split(Regex("\n+| "), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_only, unk_token="w0", bos_token="w1", eos_token="w2",
        extra_special_tokens={"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"},
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Gemma3Processor(images, tokenizer, image_seq_length=16).save_pretrained(folder)
    return images


@torch.no_grad()
def write(folder: Path) -> None:
    """Both models, with `expected.json` of each."""
    for name, make in {"whisper": _whisper, "gemma3-images": _gemma3}.items():
        torch.manual_seed(3)
        (folder / name).mkdir(exist_ok=True)
        found = make(folder / name)
        (folder / name / "expected.json").write_text(json.dumps({"media": True, **found}))
        print(f"{name}: {[len(set(tokens)) for tokens in found['tokens']]} distinct tokens")
