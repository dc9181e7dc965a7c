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
GPT_OSS: dict[str, Any] = {
    "model": "GptOss",
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 64,
    "num_attention_heads": 8,
}
"""Sinks, and every second layer with a window of 128 tokens."""


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
        ([600, 413], GPT_OSS, {}),
    ],
    ids=["one", "padded", "window", "window-padded", "static", "static-padded", "beams", "sinks"],
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


@pytest.mark.parametrize("lengths", [[600], [600, 413]], ids=["one", "padded"])
@torch.inference_mode()
def test_layers_with_sinks_and_full_windows_are_launched_directly(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of one token serves the next one: no layer looks for its plan again. Other
    backends, which selection may prefer where they are installed, have no launcher."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    from attnlib.integrations.transformers.continued import Repeat

    looked_up: list[int] = []
    pages = Repeat.pages

    def counted(self: Repeat, key: torch.Tensor, value: torch.Tensor) -> Any:
        looked_up.append(key.shape[2])
        return pages(self, key, value)

    monkeypatch.setattr(Repeat, "pages", counted)
    model = _model(**GPT_OSS)
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - n for n in lengths])
    mask = mask.to("cuda", torch.int64)
    ids = torch.randint(1, 512, mask.shape, device="cuda") * mask
    counts = []
    for tokens in (8, 8, 40):  # layers of the second prompt look for the plan of its first layer
        looked_up.clear()
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        counts.append(len(looked_up))
    assert counts[2] <= counts[1], looked_up
