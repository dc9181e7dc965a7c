"""Masks: evaluated on demand, and never reused in another step."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import masking_utils

from attnlib.integrations.transformers import devices
from attnlib.integrations.transformers.described_mask import read_mask
from attnlib.integrations.transformers.mask_tensor import MaskTensor
from attnlib.integrations.transformers.masks import attnlib_mask
from attnlib.integrations.transformers.step_mask import StepMask
from tests.integrations.tiny_models import decoder, padded, prompts, run


@pytest.mark.parametrize("window", [1, 3, 20])
def test_patterns_equal_their_mask_functions(window: int) -> None:
    """M2: the evaluated pattern equals the mask function evaluated by transformers."""
    keep = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    for function in (
        masking_utils.sliding_window_causal_mask_function(window),
        masking_utils.sliding_window_bidirectional_mask_function(window),
    ):
        step = read_mask(attnlib_mask(2, 6, 6, mask_function=function, attention_mask=keep))
        assert step is not None
        own = StepMask(step.pattern, 2, 6, 6, attention_mask=keep)
        assert torch.equal(own.dense(), step.dense())


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_padding_mask_modified_between_steps(name: str) -> None:
    """Nothing derived from a mask outlives its step, even if the caller modifies it in place."""
    model, batch = decoder(name), padded(prompts(8, 5, 3), "left")
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    model.set_attn_implementation("attnlib")
    with torch.no_grad():
        first = model(ids, attention_mask=mask).logits
        mask.fill_(True)
        second = model(ids, attention_mask=mask).logits
    assert float((second - first).abs().max()) > 1e-2
    assert (
        float(
            (second - run(model, "eager", lambda m: m(ids, attention_mask=mask).logits)).abs().max()
        )
        < 2e-5
    )


def _mask(dtype: torch.dtype = torch.float32) -> tuple[MaskTensor, torch.Tensor]:
    """A padded causal mask, and its values as eager attention gets them."""
    keep = torch.tensor([[False, True, True], [True, True, True]])
    arguments: dict[str, Any] = {
        "mask_function": masking_utils.causal_mask_function,
        "attention_mask": keep,
        "dtype": dtype,
    }
    mask = attnlib_mask(2, 3, 3, **arguments)
    assert isinstance(mask, MaskTensor)
    return mask, masking_utils.eager_mask(2, 3, 3, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shape_and_dtype_need_no_evaluation(dtype: torch.dtype) -> None:
    mask, values = _mask(dtype)
    assert (mask.shape, mask.dtype, mask.device) == (values.shape, dtype, values.device)
    assert (mask.dim(), mask.ndim, mask.size(-1), len(mask)) == (4, 4, 3, 2)
    assert "MaskTensor([2, 1, 3, 3]" in repr(mask)
    assert isinstance(read_mask(mask), StepMask) and mask._cached is None


@pytest.mark.parametrize(
    "compute",
    [
        lambda mask: mask + 1,
        lambda mask: 1 - mask,
        lambda mask: mask[:, :, 1:, :2],
        lambda mask: torch.cat([mask, mask], dim=-1),
        lambda mask: torch.zeros(2, 4, 3, 3) + mask,
        lambda mask: mask.expand(2, 4, 3, 3),
        lambda mask: mask == 0,
        lambda mask: torch.where(mask < 0, 1.0, 2.0),
        lambda mask: torch.softmax(mask.view(2, 3, 3), dim=-1),
        lambda mask: mask.to(torch.bool),
        lambda mask: torch.stack([mask.unsqueeze(0)]),
    ],
)
def test_arithmetic_uses_the_values(compute: Any) -> None:
    """A mask that a model computes with behaves like that of eager attention."""
    mask, values = _mask()
    result = compute(mask)
    assert type(result) is torch.Tensor and torch.equal(result, compute(values))


@pytest.mark.parametrize(
    "copy",
    [
        torch.clone,
        lambda mask: mask.clone(memory_format=torch.contiguous_format),
        lambda mask: mask.detach().contiguous(),
        lambda mask: mask.to("cpu"),
        lambda mask: mask.to(device="cpu", dtype=torch.bfloat16, non_blocking=True),
        lambda mask: mask.to(torch.zeros(1)),
        lambda mask: mask.cpu(),
    ],
)
def test_copies_keep_the_description(copy: Any) -> None:
    """A device map moves and clones masks between layers."""
    mask, _ = _mask()
    copied = copy(mask)
    assert isinstance(copied, MaskTensor) and read_mask(copied) is mask.step


def _assign(mask: torch.Tensor) -> None:
    mask[:, :, :, 0] = -1.0


@pytest.mark.parametrize(
    "write",
    [
        _assign,
        lambda mask: mask.fill_(-1.0),
        lambda mask: mask[:, :, 0].add_(-1.0),
        lambda mask: torch.Tensor.masked_fill_(mask, torch.ones(3, 3, dtype=torch.bool), -1.0),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_are_kept(write: Any, mode: Any) -> None:
    """A mask that a model modifies is applied with its new values, not by its description."""
    with mode():
        mask, values = _mask()
        write(mask)
        write(values)
        found = read_mask(mask)
    assert isinstance(found, torch.Tensor) and torch.equal(found, values)
    assert torch.equal(mask.clone(), values)


@pytest.mark.slow
def test_a_compiled_forward_passes_masks_through() -> None:
    """Dynamo traces around the mask, which is created outside its graphs."""
    model, batch = decoder("mistral"), padded(prompts(9, 5), "left")
    real = batch["attention_mask"].bool()
    expected = run(model, "eager", lambda m: m(**batch).logits)
    compiled = torch.compile(model.forward, backend="eager")
    found = run(model, "attnlib", lambda m: compiled(**batch).logits)
    assert float((found - expected)[real].abs().max()) < 2e-5


def test_a_mask_that_shows_everything_is_none_where_the_model_allows_it() -> None:
    """As for sdpa: layers that shorten the sequence (Informer) have no mask there."""
    both = masking_utils.bidirectional_mask_function
    window = masking_utils.sliding_window_bidirectional_mask_function(2)
    allowed = {"mask_function": both, "allow_is_bidirectional_skip": True}
    assert attnlib_mask(2, 6, 6, **allowed) is None
    padding = torch.ones(2, 6, dtype=torch.bool)
    assert attnlib_mask(2, 6, 6, **allowed, attention_mask=padding) is not None
    assert attnlib_mask(2, 6, 6, mask_function=both) is not None
    assert attnlib_mask(2, 6, 6, **(allowed | {"mask_function": window})) is not None


@pytest.mark.parametrize("window", [None, 4])
def test_a_decode_that_must_have_a_mask_has_numbers(window: int | None) -> None:
    """T5Gemma 2 appends a mask of the encoder to it, and GIT adds it to the scores."""
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    keep = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    sizes = {"q_offset": 5, "mask_function": function, "attention_mask": keep}
    own = attnlib_mask(2, 1, 6, **sizes, allow_is_causal_skip=False)
    encoder = attnlib_mask(
        2, 1, 3, mask_function=masking_utils.bidirectional_mask_function, attention_mask=keep[:, :3]
    )
    visible = masking_utils.sdpa_mask(2, 1, 6, **sizes, allow_is_causal_skip=False)
    both = torch.cat([own, encoder], dim=-1)
    assert both.dtype == torch.float32
    expected = torch.cat([visible, keep[:, None, None, :3]], dim=-1)
    assert torch.equal(both == 0, expected) and torch.equal(both < -1e38, ~expected)
    if window is None:
        assert own.is_floating_point()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("on_device", [False, True], ids=["described", "shown"])
def test_the_description_of_a_static_mask_ends_with_it(
    on_device: bool, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next garbage collection, and not never: a decode has a mask at each step."""
    monkeypatch.setattr(devices, "kind_of", lambda device: "cuda" if on_device else "cpu")
    gc.disable()
    try:
        with mode():
            mask = attnlib_mask(1, 1, 8, q_offset=torch.tensor(4))
            step = read_mask(mask)
            assert isinstance(step, StepMask) and step.is_static == on_device
            assert step.dense() is mask
        alive = ref(step)
        del mask, step
        assert alive() is None
    finally:
        gc.enable()
