"""`generate` of transformers on a GPU compiles no kernel after the first two tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.testing.compilations import compiled_kernels
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

NEW_TOKENS = 200
WARM_TOKENS = 2


def _model(**changes: Any) -> Any:
    """A Llama of two layers with attnlib and random weights; no token ends a sequence."""
    transformers = pytest.importorskip("transformers")
    from attnlib.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    name = changes.pop("model", "Llama")
    config = getattr(transformers, f"{name}Config")(**{**fields, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_attn_implementation("attnlib")
    return model.to("cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("lengths", "model", "options"),
    [
        ([600], {}, {}),
        ([600, 413, 300], {}, {}),
        ([600], {"model": "Mistral", "sliding_window": 512}, {}),
        ([600, 413], {"model": "Mistral", "sliding_window": 512}, {}),
        ([600], {}, {"cache_implementation": "static"}),
        ([600, 413], {}, {"cache_implementation": "static"}),
        ([600], {}, {"num_beams": 2}),
    ],
    ids=["one", "padded", "window", "window-padded", "static", "static-padded", "beams"],
)
@torch.inference_mode()
def test_generate_compiles_nothing_per_token(
    lengths: list[int], model: dict[str, Any], options: dict[str, Any]
) -> None:
    """The strides of a growing cache are no constants of a kernel."""
    transformers = pytest.importorskip("transformers")
    counts: list[int] = []

    class _Count(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            counts.append(len(compiled))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    llama = _model(**model)
    ids = torch.randint(1, 512, (len(lengths), max(lengths)), device="cuda")
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - n for n in lengths])
    mask = mask.to("cuda", torch.int64)
    with compiled_kernels() as compiled:
        llama.generate(
            input_ids=ids * mask,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            disable_compile=True,
            stopping_criteria=[_Count()],
            **options,
        )
    assert len(counts) == NEW_TOKENS
    late = [kernel.name for kernel in compiled[counts[WARM_TOKENS - 1] :]]
    assert not late, f"{len(late)} kernels compiled after token {WARM_TOKENS}: {late[:4]}"
