"""What attention costs the host per token of `generate` on a GPU: Python calls and torch operations
of a layer, beside those of eager attention and sdpa.

A CPU counts them: kernels are not launched, everything around them is that of a GPU.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

from attnlib.integrations.transformers import (
    attention,
    decode_batch,
    devices,
    repeated,
    row_copy,
)
from tests.integrations.tiny_models import prompts, randomized
from tests.integrations.transformers.test_repeated import MODELS, SIZES
from tests.integrations.transformers.test_traced import CACHE

PROMPT, STEPS, LAYERS = 9, 6, 4
FUNCTIONS = {
    "attnlib_attention": "attention",
    "eager_attention_forward": "attention",
    "sdpa_attention_forward": "attention",
    "update": "cache",
    "create_causal_mask": "masks",
    "create_sliding_window_causal_mask": "masks",
}


def part_of(code: CodeType) -> str | None:
    """The part that begins with a call of this function."""
    part = FUNCTIONS.get(code.co_name)
    return None if part == "cache" and "cache_utils" not in code.co_filename else part


class Calls:
    """A profile function that counts the Python calls of each part, once for each layer or mask.

    Attributes:
        counts: of each part, the calls of every layer or mask, with that of the part itself.
    """

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {"attention": [], "cache": [], "masks": []}
        self._stack: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename == __file__:  # what stands for a launch, which is no Python
            return
        if event == "call":
            part = self._stack[-1] if self._stack else part_of(frame.f_code)
            if part is not None:
                if not self._stack:
                    self.counts[part].append(0)
                self._stack.append(part)
                self.counts[part][-1] += 1
        elif event == "return" and self._stack:
            self._stack.pop()


class Operations(TorchDispatchMode):
    """Counts the operations of torch in each part, over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            part = part_of(frame.f_code)
            if part is not None:
                self.counts[part] += 1
                break
            frame = frame.f_back
        return func(*args, **(kwargs or {}))


class NoLaunch:
    """Stands for a `KeyLister`: rows see no key."""

    def __init__(
        self, ratio: int, *, table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor
    ) -> None:
        table.fill_(-1)
        lengths.zero_()
        torch.arange(starts.shape[0], out=starts)

    def run(self, visible: torch.Tensor) -> None: ...


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a GPU, whose launches are not made. The first step runs interpreted kernels."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)
    monkeypatch.setattr(devices, "kind_of", lambda device: "cuda")
    monkeypatch.setattr(decode_batch, "operation", lambda *_: NoLaunch)
    monkeypatch.setattr(decode_batch, "_local", threading.local())  # its batches never run
    monkeypatch.setattr(row_copy.RowCopy, "run", lambda *_: None)

    def bind(bound: Any, known: Any, *_: Any) -> None:
        bound.group, bound.launch = known.layer.impl._group, lambda *_: True

    monkeypatch.setattr(repeated, "_bind", bind)
    # A GPU does not ask for it.
    monkeypatch.setattr(attention, "attend_known", lambda *_: None)


@torch.no_grad()
def last_step(model: Any, implementation: str, around: Callable[[Any], Any]) -> None:
    """Run decode steps of a model, the last one within `around`."""
    model.set_attn_implementation(implementation)
    ids = torch.tensor(prompts(PROMPT))
    cache, mask = hf.DynamicCache(config=model.config), torch.ones_like(ids)
    model(ids, attention_mask=mask, **{CACHE: cache}, use_cache=True)
    for step in range(STEPS):
        mask = torch.ones(1, PROMPT + step + 1, dtype=torch.long)
        given = {"attention_mask": mask, CACHE: cache, "use_cache": True}

        def run(given: dict[str, Any] = given) -> None:
            model(torch.tensor([[5]]), **given)

        run() if step < STEPS - 1 else around(run)


@torch.no_grad()
def third_prompt(model: Any, implementation: str, around: Callable[[Any], Any]) -> None:
    """Run three prompts, the last one within `around`."""
    model.set_attn_implementation(implementation)
    for prompt in range(3):
        ids = torch.tensor(prompts(PROMPT + prompt))
        given = {CACHE: hf.DynamicCache(config=model.config), "use_cache": True}

        def run(ids: torch.Tensor = ids, given: dict[str, Any] = given) -> None:
            model(ids, attention_mask=torch.ones_like(ids), **given)

        around(run) if prompt == 2 else run()


def calls_of(model: Any, implementation: str, steps: Any = last_step) -> dict[str, list[int]]:
    found = Calls()

    def profiled(run: Callable[[], None]) -> None:
        before = sys.getprofile()
        sys.setprofile(found)
        try:
            run()
        finally:
            sys.setprofile(before)

    steps(model, implementation, profiled)
    return found.counts


def operations_of(model: Any, implementation: str) -> Counter[str]:
    found = Operations()

    def dispatched(run: Callable[[], None]) -> None:
        with found:
            run()

    # Under the mode no call equals one without: its first steps are made in it, too.
    with Operations():
        last_step(model, implementation, dispatched)
    return found.counts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_layer_takes_fewer_calls_and_operations(name: str) -> None:
    """Of layers behind the first one of their kind, which begins the step for all of them."""
    others = ["eager", "sdpa"] if name == "llama" else ["eager"]
    kinds = 1 if name == "llama" else 2
    model = randomized(MODELS[name]())
    ours, operations = calls_of(model, "attnlib"), operations_of(model, "attnlib")
    assert len(ours["attention"]) == LAYERS and max(ours["attention"][kinds:]) <= 3
    assert min(ours["cache"]) <= 4 and max(ours["cache"]) <= 5  # with a window
    # The output of each layer, and once per step the padding of a window.
    assert operations["attention"] == LAYERS + kinds - 1
    # Views of keys and values, of a window two of each; the launch is none.
    assert operations["cache"] == (2 if name == "llama" else 3) * LAYERS
    for other in others:
        assert max(ours["attention"][kinds:]) <= min(calls_of(model, other)["attention"])
        assert operations["attention"] < operations_of(model, other)["attention"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_layer_of_a_prompt_takes_as_few_calls(name: str) -> None:
    """Layers behind the first one of their kind are launched directly, in prompts of new sizes.
    Three calls note that the layer of the cache may grow."""
    model = randomized(MODELS[name]())
    ours = calls_of(model, "attnlib", third_prompt)["attention"]
    kinds = 1 if name == "llama" else 2
    assert len(ours) == LAYERS and max(ours[kinds:]) <= 6
    assert max(ours[kinds:]) <= min(calls_of(model, "eager", third_prompt)["attention"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_whole_step_takes_fewer_calls(name: str) -> None:
    """Masks, caches and attention of a step, with the layers of a published model."""
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 16 if name == "llama" else 24}
    if name == "llama":
        model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    else:
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}
        model = hf.GptOssForCausalLM(hf.GptOssConfig(**sizes, **experts))
    others = ["eager", "sdpa"] if name == "llama" else ["eager"]
    totals = {
        each: sum(sum(counts) for counts in calls_of(randomized(model), each).values())
        for each in ("attnlib", *others)
    }
    assert totals.pop("attnlib") < min(totals.values()), totals
