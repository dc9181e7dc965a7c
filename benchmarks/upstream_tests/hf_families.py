"""transformers' common tests of models, over small configurations of many families.

Read by pytest in the processes that `benchmarks.upstream_tests.hf` starts; `upstream` is its module
of transformers' tests. The source distribution of transformers has the common tests, but not the
configurations of its model tests: those here are attnlib's.
"""

from __future__ import annotations

import os
import unittest
from typing import Any

import torch
import transformers

from benchmarks.upstream_tests.hf_source import common_tests

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MHA = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}
_HEADS = _SIZES | {"head_dim": 8}
_GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 99,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": 99,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "mistral": ("Mistral", _HEADS),
    "qwen2": ("Qwen2", _SIZES),
    "qwen3": ("Qwen3", _HEADS),
    "gemma": ("Gemma", _HEADS),
    "gemma2": ("Gemma2", _HEADS),
    "phi3": ("Phi3", _SIZES),
    "olmo2": ("Olmo2", _SIZES),
    "cohere": ("Cohere", _SIZES),
    "cohere2": ("Cohere2", _HEADS),
    "granite": ("Granite", _SIZES),
    "smollm3": ("SmolLM3", _SIZES),
    "starcoder2": ("Starcoder2", _SIZES),
    "stablelm": ("StableLm", _SIZES),
    "helium": ("Helium", _HEADS),
    "glm": ("Glm", _HEADS),
    "gpt_neox": ("GPTNeoX", _MHA),
    "gpt2": ("GPT2", _GPT2),
    "opt": ("OPT", {**_MHA, "ffn_dim": 40, "word_embed_proj_dim": 32}),
    "bert": ("Bert", _MHA),
    "bart": ("Bart", _BART),
}
"""Family -> the beginning of its class names, and its sizes."""


class _Tester:
    """What the common tests read of a model tester."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    expected_num_hidden_layers = 3

    def __init__(self, family: str) -> None:
        self._prefix, self._sizes = FAMILIES[family]

    def get_config(self) -> Any:
        """A small configuration."""
        return getattr(transformers, f"{self._prefix}Config")(**self._sizes)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """A configuration and a batch with padding on the right."""
        config = self.get_config()
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        mask = torch.ones_like(ids).tril()
        inputs = {"input_ids": ids, "attention_mask": mask}
        if config.is_encoder_decoder:
            inputs |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": mask}
        return config, inputs


def _classes(prefix: str) -> tuple[Any, ...]:
    endings = ("Model", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    found = (getattr(transformers, prefix + ending, None) for ending in endings)
    return tuple(x for x in found if x is not None and x._can_set_attn_implementation())


def _test_class(family: str) -> type:
    classes = _classes(FAMILIES[family][0])

    def set_up(self: Any) -> None:
        self.model_tester = _Tester(family)

    body = {
        "setUp": set_up,
        "all_model_classes": classes,
        "all_generative_model_classes": (),
        "is_encoder_decoder": family == "bart",
        "__module__": __name__,
    }
    return type(f"Test_{family}", (common_tests().ModelTesterMixin, unittest.TestCase), body)


for _family in os.environ.get("ATTNLIB_FAMILIES", "").split(","):
    if _family:
        globals()[f"Test_{_family}"] = _test_class(_family)
