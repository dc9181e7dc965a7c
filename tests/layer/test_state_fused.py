"""`StateLayer.step`: the separate launches, checks of forms and calls, torch.compile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError
from attnlib.ops.states.step_form import StepForm
from attnlib.ops.torch.states.step_parts import gated_norm, state_gates
from attnlib.spec import StateSpec
from tests.layer.test_state import batch_of, layer_of

SPEC = StateSpec(
    num_heads=4, num_key_heads=2, key_size=16, value_size=16, qk_norm=True, conv_channels=128,
    conv_width=4, dtype=torch.float32, max_rollback=1,
)  # fmt: skip
FORM = StepForm(
    gates="softplus", rate=torch.ones(4), bias=torch.zeros(4), norm_size=16,
    norm_weight=torch.ones(16), output_gate="silu",
)  # fmt: skip


def tokens(count: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    random = torch.Generator().manual_seed(count)
    x, a, b, z = (torch.randn(count, n, generator=random) for n in (128, 4, 4, 64))
    return x, (a, b), z


def caches(layer: attnlib.StateLayer) -> tuple[attnlib.StateCache, attnlib.StateCache]:
    """Two with equal bytes."""
    size = (3, layer.layout.bytes_per_slot)
    one, two = (attnlib.StateCache(layer.spec, torch.zeros(size).byte()) for _ in range(2))
    return one, two


def test_a_step_is_its_parts() -> None:
    """The torch backend: the operations one by one have the same bits."""
    layer, (x, gates, z) = layer_of(SPEC), tokens(6)
    one, two = caches(layer)
    metadata = batch_of(layer, [4, 1], [4, 1], [2, 0])
    got = layer.step(x, gates, z, FORM, one, metadata)
    q, k, v = layer.convolve(x, two, metadata).split([32, 32, 64], 1)
    wanted = layer(q, k, v, *state_gates(*gates, FORM), two, metadata)
    gated_norm(wanted.view(6, 4, 16), z, FORM)
    assert torch.equal(got, wanted) and not got[5].any() and got[:5].all()
    assert torch.equal(one.memory, two.memory)
    with pytest.raises(ContractError, match="output is z, which is read after"):
        layer.step(x, gates, z, FORM, one, metadata, output=z)
    with pytest.raises(ContractError, match="output is in the memory of x, which is read after"):
        layer.step(x, gates, z, FORM, one, metadata, output=x.view(-1)[9:393].view(6, 64))
    assert torch.equal(one.memory, two.memory)


@pytest.mark.parametrize("gates", ["softplus", "bounded", "mamba2"])
@pytest.mark.parametrize("output_gate", ["silu", "sigmoid"])
def test_bits_of_a_row_do_not_depend_on_its_step(gates: str, output_gate: str) -> None:
    """T18, the torch backend: gates and norm have no other bits at the end of a tensor."""
    spec = SPEC.replace(
        num_heads=3, num_key_heads=1, key_size=4, value_size=5, conv_channels=23,
        batch_invariant=True,
    )  # fmt: skip
    random, size = torch.Generator().manual_seed(1), 150
    x, a, b, z = (torch.randn(size, n, generator=random) * 3 for n in (23, 3, 3, 15))
    form = StepForm(
        gates=gates, rate=torch.rand(3), bias=torch.randn(3), norm_size=15,
        norm_weight=torch.ones(15), output_gate=output_gate,
        bounds=(-5.0 if gates == "bounded" else 0.0, 8.0),
    )  # fmt: skip
    layer, results = layer_of(spec), []
    for count in (size, 1):
        cache, parts = attnlib.StateCache.allocate(layer.spec, 1, device="cpu"), []
        for first in range(0, size, count):
            rows = slice(first, first + count)
            pair = (a[rows], None if gates == "mamba2" else b[rows])
            metadata = batch_of(layer, [count], [first + count], [0])
            parts.append(layer.step(x[rows], pair, z[rows], form, cache, metadata))
        results.append(torch.cat(parts))
    assert torch.equal(*results)


@pytest.mark.parametrize("gates", ["softplus", "mamba2", "given"])
def test_warmup_runs_steps_of_a_form(gates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each class of batch, and no slot changes."""
    raw = {"rate": FORM.rate, "bias": FORM.bias} if gates != "given" else {}
    form = StepForm(gates=gates, norm_size=16, norm_weight=torch.ones(16), **raw)
    layer, limits = (
        layer_of(SPEC),
        attnlib.BatchLimits(max_num_reqs=3, max_num_tokens=12, max_seq_len=40),
    )
    cache, _ = caches(layer)
    before, step, longest = cache.memory.clone(), attnlib.StateLayer.step, list[int]()

    def counted(self: Any, *given: Any) -> torch.Tensor:
        longest.append(given[-1].max_query_len)
        return step(self, *given)

    monkeypatch.setattr(attnlib.StateLayer, "step", counted)
    report = attnlib.warmup(layer, cache, limits, form=form)
    assert len(longest) == 2 * len(report.batches) and {1, 2} <= set(longest)  # with sources
    assert torch.equal(cache.memory, before)


def test_bounds_may_be_a_list() -> None:
    """As in a configuration that was read from a file."""
    layer, (x, (step_size, _), z) = layer_of(SPEC.replace(update="add", qk_norm=False)), tokens(5)
    changes: dict[str, Any] = {"gates": "mamba2", "bounds": [0.0, float("inf")]}
    form = dataclasses.replace(FORM, **changes)
    (one, two), metadata = caches(layer), batch_of(layer, [4, 1], [4, 1], [2, 0])
    got = layer.step(x, (step_size, None), z, form, one, metadata)
    form = dataclasses.replace(form, bounds=(0.0, float("inf")))
    assert torch.equal(got, layer.step(x, (step_size, None), z, form, two, metadata))


def test_no_tokens() -> None:
    layer, (x, gates, z) = layer_of(SPEC), tokens(0)
    cache = attnlib.StateCache.allocate(layer.spec, 3, device="cpu")
    metadata = batch_of(layer, [0], [0], [2])
    assert layer.step(x, gates, z, FORM, cache, metadata).shape == (0, 64)


def test_given_and_constant_decays() -> None:
    """A lightning layer behind a convolution: its decay is a tensor of the layer."""
    spec = SPEC.replace(update="add", decay="constant", has_beta=False, qk_norm=False)
    layer, (x, _, _) = layer_of(spec), tokens(3)
    cache = attnlib.StateCache.allocate(layer.spec, 3, device="cpu")
    metadata = batch_of(layer, [3], [3], [2])
    got = layer.step(x, (None, None), None, StepForm(), cache, metadata)
    q, k, v = layer.convolve(x, cache, metadata).split([32, 32, 64], 1)
    assert torch.equal(got, layer(q, k, v, None, None, cache, metadata))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "kqv"}, r"order='kqv' must be one of \('qkv', 'vkq'\)"),
        ({"gates": "given"}, "rate with gates='given', norm_size=16: leave it out"),
        ({"bias": None}, "bias with gates='softplus', norm_size=16: pass it"),
        ({"norm_weight": None}, "norm_weight with gates='softplus', norm_size=16: pass it"),
        ({"norm_size": 16.0}, "norm_size 16.0 is a float; it must be an integer"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 must be a finite number of at least 0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan must be a finite number"),
        ({"norm_size": 0, "norm_weight": None}, "output_gate='silu' with norm_size=0"),
    ],
)
def test_forms_that_no_layer_has(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        dataclasses.replace(FORM, **changes)


@pytest.mark.parametrize(
    ("spec", "form", "call", "message"),
    [
        ({"conv_channels": 24}, {}, {}, r"conv_channels=24: it needs both, .* \(128\)"),
        ({}, {"norm_size": 24, "norm_weight": torch.ones(24)}, {}, "norm_size=24 must be a mult"),
        ({}, {"rate": torch.ones(3)}, {}, r"rate is torch.float32 \[3\] with strides"),
        ({}, {"norm_weight": torch.ones(3)}, {}, r"of any dtype, dense, of shape \[16\]"),
        ({}, {}, {"x": None}, "x of a state layer cannot be None"),
        ({}, {}, {"gates": None}, "gates is a NoneType; it must be a pair of gates"),
        ({}, {}, {"gates": (torch.zeros(3, 4), [0.0])}, r"gates\[1\] is a list; it must be a"),
        ({}, {"bias": torch.zeros(4).half()}, {}, "bias is torch.float16"),
        ({"has_beta": False, "update": "add"}, {"gates": "mamba2"}, {}, "has_beta=False"),
        ({"decay": "channel"}, {"gates": "mamba2"}, {}, "gates='mamba2' with decay='channel'"),
        ({}, {}, {"z": None}, "z is missing: pass it"),
        ({}, {"gates": "mamba2"}, {}, r"gates\[1\] is given: pass None"),
        ({}, {}, {"z": torch.zeros(3, 60)}, r"z is float32 \[3, 60\]; it must be float32 \[3, 64"),
        ({}, {}, {"z": torch.zeros(64, 3).mT}, r"z has strides \(1, 3\); its rows must be dense"),
        ({}, {}, {"x": torch.zeros(3, 128).half()}, "x is float16"),
    ],
    ids=lambda value: "",
)
def test_wrong_calls(
    spec: dict[str, Any], form: dict[str, Any], call: dict[str, Any], message: str
) -> None:
    """Nothing is written."""
    layer, (x, gates, z) = layer_of(SPEC.replace(**spec)), tokens(3)
    cache = attnlib.StateCache.allocate(layer.spec, 3, device="cpu")
    before, metadata = cache.memory.clone(), batch_of(layer, [3], [3], [2])
    given = {"x": x, "gates": gates, "z": z, **call}
    with pytest.raises(ContractError, match=message):
        layer.step(*given.values(), dataclasses.replace(FORM, **form), cache, metadata)
    assert torch.equal(cache.memory, before)


@pytest.mark.parametrize("form", ["given", "softplus"])
def test_gates_are_validated_before_the_convolution(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window would be a step ahead of the state, and the step could not be repeated."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    layer, (x, (a, b), z) = layer_of(SPEC), tokens(3)
    cache, metadata = caches(layer)[0], batch_of(layer, [3], [3], [2])
    given = StepForm() if form == "given" else FORM
    a = torch.full_like(a, 0.5 if form == "given" else float("inf"))
    with pytest.raises(
        ContractError, match=r"log_decay\[0\]\[0\]=\S+ must be finite and at most 0"
    ):
        layer.step(x, (a, b.sigmoid()), z if form == "softplus" else None, given, cache, metadata)
    assert not cache.memory.any()


def test_a_convolution_validates_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the recurrence could not follow changes no window."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    layer, (x, gates, z) = layer_of(SPEC), tokens(3)
    cache = attnlib.StateCache.allocate(layer.spec, 3, device="cpu")
    layer.step(x, gates, z, FORM, cache, batch_of(layer, [3], [3], [2]))
    later = batch_of(layer, [3], [6], [2])
    layer.convolve(x, cache, later)  # without its recurrence
    before, last = cache.memory.clone(), batch_of(layer, [3], [9], [2])
    message = "continues from 6 tokens, and the state in slot 2 can continue from 2 to 3"
    with pytest.raises(ContractError, match=message):
        layer.convolve(x, cache, last)
    with pytest.raises(ContractError, match=message):
        layer.step(x, gates, z, FORM, cache, last)
    assert torch.equal(cache.memory, before)
    layer(*torch.zeros(3, 128).split([32, 32, 64], 1), *gates_of(3), cache, later)
    layer.convolve(x, cache, last)


def gates_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, 4), torch.ones(count, 4)


@pytest.mark.parametrize("place", ["z", "x"])
def test_a_compiled_step_into_its_inputs(place: str) -> None:
    """Tracing sees no addresses: inputs are read before the output is written."""
    layer, (x, gates, z) = layer_of(SPEC), tokens(3)
    (one, two), metadata = caches(layer), batch_of(layer, [3], [3], [2])
    run = torch.compile(
        lambda out: layer.step(x, gates, z, FORM, one, metadata, output=out),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.no_grad():
        wanted = layer.step(x, gates, z, FORM, two, metadata)
        out = z if place == "z" else x.view(-1)[9:201].view(3, 64)
        assert run(out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, wanted)
    assert torch.equal(one.memory, two.memory)


@pytest.mark.slow
def test_under_torch_compile() -> None:
    layer, (x, gates, z) = layer_of(SPEC), tokens(3)
    one, two = caches(layer)
    metadata = batch_of(layer, [3], [3], [2])

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer.step(x + 1, gates, z, FORM, one, metadata) * 2

    with torch.no_grad():
        got = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
        wanted = 2 * layer.step(x + 1, gates, z, FORM, two, metadata)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(one.memory, two.memory)
