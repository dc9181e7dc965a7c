"""What changes between two calls with one batch reaches the second call, or is refused.

The cells of the table of `docs/validation.md` under "Changes between two calls".
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import forward_ad

import attnlib
from attnlib.errors import ContractError
from attnlib.score_functions.builtin import documents

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4
)


class Setup(NamedTuple):
    """A layer that was called three times with one batch, and the arguments of a call."""

    layer: attnlib.Attention
    cache: attnlib.PagedKVCache
    step: Any
    query: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor]
    patch: pytest.MonkeyPatch
    run: Callable[..., Any] = lambda layer, *arguments: layer(*arguments)

    def call(self, query: torch.Tensor | None = None) -> Any:
        """The output of the layer over the cache."""
        given = self.query if query is None else query
        return self.run(self.layer, given, *self.new, self.cache, self.step)


def _common(**changes: Any) -> attnlib.CommonAttentionMetadata:
    more = changes.pop("score_tensors", None)
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 5], [9, 12], [[6, 2, 5], [1, 3, 4]], 4, "cpu", max_seq_len=12, score_tensors=more
    )
    return common.replace(**changes) if changes else common


def _setup(spec: attnlib.AttentionSpec, patch: pytest.MonkeyPatch) -> Setup:
    torch.manual_seed(0)
    layer = attnlib.Attention(spec, backend="torch", device="cpu", prefix="layers.0")
    cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu")
    for part in (cache.key_cache, cache.value_cache):
        part.normal_()
    tensors = None
    if spec.score_function is not None:
        tensors = {"document_begin": torch.zeros(2, 12, dtype=torch.int32)}
    common = _common(score_tensors=tensors)
    step = layer.backend.make_builder(spec, "cpu").build(0, common)
    new = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    found = Setup(layer, cache, step, torch.randn(6, 4, 8), new, patch)
    for _ in range(3):
        found.call()
    assert step.recent_plan is not None  # the next call takes the quick path
    return found


def _fresh(setup: Setup, common: attnlib.CommonAttentionMetadata) -> torch.Tensor:
    """The output of a new layer with a new batch."""
    layer = attnlib.Attention(setup.layer.spec, backend="torch", device="cpu")
    step = layer.backend.make_builder(layer.spec, "cpu").build(0, common)
    out: torch.Tensor = layer(setup.query, *setup.new, setup.cache, step)
    return out


def _forward(setup: Setup) -> None:
    setup.layer.forward = lambda *args, **kwargs: "replaced"  # type: ignore[method-assign]
    assert setup.call() == "replaced"


def _hook(setup: Setup) -> None:
    setup.layer.register_forward_hook(lambda *args: "hooked")
    assert setup.call() == "hooked"


def _spec(setup: Setup) -> None:
    with pytest.raises(ContractError, match="spec of layer layers.0 cannot be assigned"):
        setup.layer.spec = SPEC.replace(sliding_window=2)
    setup.call()


def _validate(setup: Setup) -> None:
    setup.step.block_table[0, 0] = -1
    setup.step.drop_plans()
    setup.patch.setenv("ATTNLIB_VALIDATE", "1")
    with pytest.raises(ContractError):
        setup.call()
    setup.step.block_table[0, 0] = 6
    setup.call()
    setup.step.max_seq_len = 3
    with pytest.raises(ContractError, match="max_seq_len"):
        setup.call()
    setup.patch.delenv("ATTNLIB_VALIDATE")
    setup.call()


def _gradient(setup: Setup) -> None:
    expected = setup.call()
    if torch.is_inference_mode_enabled():
        assert torch.equal(setup.call(setup.query.clone()), expected)
        return
    query = setup.query.clone().requires_grad_()
    with pytest.raises(ContractError, match="requires a gradient"):
        setup.call(query)
    with torch.no_grad():
        assert torch.equal(setup.call(query), expected)
    with torch.no_grad(), forward_ad.dual_level():
        assert torch.equal(setup.call(), expected)
        query = forward_ad.make_dual(setup.query, torch.ones_like(setup.query))
        for _ in range(2):
            with pytest.raises(ContractError, match="a tangent of forward-mode gradients"):
                setup.call(query)


def _autocast(setup: Setup) -> None:
    expected = setup.call()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(setup.call(), expected)


def _lengths(setup: Setup) -> None:
    setup.step.seq_lens.copy_(torch.tensor([5, 8]))
    lengths = torch.tensor([5, 8], dtype=torch.int32)
    assert torch.equal(setup.call(), _fresh(setup, _common(seq_lens=lengths, seq_lens_cpu=lengths)))


def _blocks(setup: Setup) -> None:
    setup.step.block_table.sub_(1)
    table = torch.tensor([[5, 1, 4], [0, 2, 3]], dtype=torch.int32)
    assert torch.equal(setup.call(), _fresh(setup, _common(block_table_tensor=table)))


def _score(setup: Setup) -> None:
    with pytest.raises(ContractError, match="assign metadata.score_tensors"):
        setup.step.score_tensors["document_begin"] = torch.ones(2, 12, dtype=torch.int32)
    begins = torch.full((2, 12), 3, dtype=torch.int32)
    setup.step.score_tensors = {"document_begin": begins}
    expected = _fresh(setup, _common(score_tensors={"document_begin": begins}))
    assert torch.equal(setup.call(), expected)


def _resize(setup: Setup) -> None:
    expected, views = setup.call(), (setup.cache.key_cache, setup.cache.value_cache)
    for view in views:
        view.resize_(5, *view.shape[1:])
    with pytest.raises(ContractError, match=r"\[P3\]"):
        setup.call()
    for view, message in zip(views, ("must agree in blocks", ""), strict=True):
        view.resize_(8, *view.shape[1:])
        if message:
            with pytest.raises(ContractError, match=message):
                setup.call()
    assert torch.equal(setup.call(), expected)


CHANGES: dict[str, Callable[[Setup], None]] = {
    "`layer.forward = f`": _forward,
    "a forward hook": _hook,
    "`layer.spec = other`": _spec,
    "`ATTNLIB_VALIDATE`": _validate,
    "a query that requires a gradient": _gradient,
    "`torch.autocast`": _autocast,
    "sequence lengths in place": _lengths,
    "block ids in place": _blocks,
    "`resize_` of the views of a cache": _resize,
    "an entry of `score_tensors`": _score,
}


def _block_id(setup: Setup) -> None:
    setup.step.block_table[1, 0] = 99


def _negative_block_id(setup: Setup) -> None:
    setup.step.block_table[0, 1] = -1


def _length(setup: Setup) -> None:
    setup.step.seq_lens[1] = 13


def _slot(setup: Setup) -> None:
    setup.step.slot_mapping[2] = 32


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("change", [_block_id, _negative_block_id, _length, _slot])
def test_addresses_that_leave_the_cache_in_place_are_refused(
    change: Callable[[Setup], None], mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3, P4: as before the first call, in each later one, before anything is written."""
    setup = _setup(SPEC, monkeypatch)
    cache = setup.cache
    before = cache.key_cache.clone(), cache.value_cache.clone()
    new = setup._replace(new=(torch.randn(6, 2, 8), torch.randn(6, 2, 8)))
    with mode():
        change(new)
        for _ in range(2):
            with pytest.raises(ContractError, match=r"\[P[34]\]"):
                new.call()
    assert torch.equal(cache.key_cache, before[0]) and torch.equal(cache.value_cache, before[1])


def _here(setup: Setup, change: Callable[[Setup], None]) -> None:
    change(setup)


def _inference(setup: Setup, change: Callable[[Setup], None]) -> None:
    with torch.inference_mode():
        change(setup)


def _deepcopy(setup: Setup, change: Callable[[Setup], None]) -> None:
    change(setup._replace(layer=copy.deepcopy(setup.layer), step=copy.deepcopy(setup.step)))
    _untouched(setup)


def _pickled(setup: Setup, change: Callable[[Setup], None]) -> None:
    layer, step = pickle.loads(pickle.dumps((setup.layer, setup.step)))
    change(setup._replace(layer=layer, step=step))
    _untouched(setup)


def _untouched(setup: Setup) -> None:
    """The originals of copies that were changed."""
    tensors = setup.step.score_tensors
    assert torch.equal(setup.call(), _fresh(setup, _common(score_tensors=tensors)))


def _thread(setup: Setup, change: Callable[[Setup], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(change, setup).result()


def _compiled(setup: Setup, change: Callable[[Setup], None]) -> None:
    """By default, torch does not notice hooks that are registered after the trace of any module."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        traced = setup._replace(run=torch.compile(setup.run, backend="eager"))
        for _ in range(2):
            traced.call()
        change(traced)
    torch.compiler.reset()


SITUATIONS: dict[str, Callable[[Setup, Callable[[Setup], None]], None]] = {
    "grad mode": _here,
    "inference mode": _inference,
    "deep copies": _deepcopy,
    "pickled": _pickled,
    "another thread": _thread,
    "`torch.compile`": _compiled,
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_reaches_the_next_call_or_is_refused(
    change: str, situation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPEC.replace(score_function=documents()) if "score" in change else SPEC
    SITUATIONS[situation](_setup(spec, monkeypatch), CHANGES[change])


def test_the_page_lists_what_is_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "validation.md").read_text()
    table = page.split("## Changes between two calls")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[0].removeprefix("| ") for row in rows] == list(CHANGES)
    assert all(name in table for name in SITUATIONS)
