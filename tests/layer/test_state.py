"""State layers: results, checks of calls, pickle, torch.compile, ATTNLIB_VALIDATE."""

from __future__ import annotations

import copy
import importlib
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import attnlib
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.triton.launch.compilations import CompiledKernel
from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import TokenInputs, draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.oracle import convolve, recurrence

GDN = KINDS["gated delta"].replace(max_rollback=3)


def layer_of(spec: StateSpec, **changes: Any) -> attnlib.StateLayer:
    given = draw_layer(spec)
    tensors = {
        "conv_weight": given.conv_weight, "conv_bias": given.conv_bias, "skip": given.skip,
        "log_decay": given.log_decay,
    }  # fmt: skip
    return attnlib.StateLayer(spec, **{**tensors, "device": "cpu", **changes})


def batch_of(layer: attnlib.StateLayer, lengths: list[int], totals: list[int], slots: list[int]):
    common = attnlib.CommonAttentionMetadata.from_lengths(
        lengths, totals, device="cpu", state_slots=slots
    )
    return layer.backend.make_builder(layer.spec, "cpu").build(0, common)


def arguments(inputs: TokenInputs) -> list[torch.Tensor | None]:
    return [inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta]


@pytest.mark.parametrize("name", KINDS)
def test_two_steps(name: str) -> None:
    """Flat and per-head tensors, a prefill and then a decode, beside padding."""
    spec = KINDS[name]
    layer, tokens = layer_of(spec), draw_tokens(spec, 7, 3)
    own, cache = draw_layer(spec), attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
    outs, convolved = [], []
    for first, end in ((0, 6), (6, 7)):
        part = tokens.rows(first, end)
        metadata = batch_of(layer, [end - first, 0], [end, 0], [2, -1])
        if spec.has_convolution:
            convolved.append(layer.convolve(part.x, cache, metadata))
        if spec.has_recurrence:
            given = arguments(part)
            if first:
                given[:3] = [x.flatten(1) for x in given[:3]]
            outs.append(layer(*given, cache, metadata).view(end - first, spec.num_heads, -1))
    if spec.has_recurrence:
        decay = tokens.log_decay if own.log_decay is None else own.log_decay
        wanted, _ = recurrence(
            spec, tokens.query, tokens.key, tokens.value, decay, tokens.beta,
            scale=own.scale, skip=own.skip,
        )  # fmt: skip
        torch.testing.assert_close(torch.cat(outs).double(), wanted, rtol=1e-5, atol=1e-5)
        assert cache.positions([2]) == [(7, 7)]
    if spec.has_convolution:
        wanted = convolve(spec, tokens.x, own.conv_weight, own.conv_bias)
        torch.testing.assert_close(torch.cat(convolved).double(), wanted, rtol=1e-5, atol=1e-5)


def test_output_argument() -> None:
    layer, tokens = layer_of(GDN), draw_tokens(GDN, 3, 0)
    cache = attnlib.StateCache.allocate(layer.spec, 2, device="cpu")
    metadata = batch_of(layer, [2], [2], [0])
    out = torch.full((3, 4, 16), 7.0)
    assert layer(*arguments(tokens), cache, metadata, output=out) is out
    assert out[:2].any() and not out[2].any()
    x = torch.full((3, 24), 7.0)
    assert layer.convolve(tokens.x, cache, metadata, output=x) is x and not x[2].any()


def test_the_spec_of_a_layer_is_resolved() -> None:
    assert (layer_of(GDN).spec.form, layer_of(GDN).spec.chunk_size) == ("tail", 16)
    assert layer_of(KINDS["gla"]).spec.form == "plain"
    assert layer_of(GDN.replace(form="snapshots")).spec.form == "snapshots"
    assert layer_of(GDN.replace(chunk_size=32)).layout.chunk_size == 32


def test_a_backend_without_states() -> None:
    with pytest.raises(UnsupportedConfigError, match="serves no state layers"):
        layer_of(GDN, backend=_Attends)


class _Attends(attnlib.AttentionBackend):
    capabilities = attnlib.Capabilities(devices=("cpu",))

    @staticmethod
    def get_name() -> str:
        return "attends"

    @staticmethod
    def get_impl_cls() -> type[attnlib.AttentionImpl]:
        from attnlib.backends.torch.impl import TorchImpl

        return TorchImpl


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_weight": None}, "conv_weight is missing, and the spec has conv_channels=24"),
        ({"conv_weight": torch.zeros(24, 3)}, r"conv_weight is float32 \[24, 3\]; it must be"),
        ({"conv_weight": torch.zeros(24, 4).half()}, "conv_weight is float16"),
        ({"conv_weight": [[0.0] * 4] * 24}, "conv_weight is a list; it must be a torch.Tensor"),
        ({"conv_bias": torch.zeros(24)}, "conv_bias is given, and the spec has has_conv_bias=F"),
        ({"skip": torch.zeros(4)}, "skip is given, and the spec has has_skip=False"),
        ({"log_decay": torch.zeros(4)}, "log_decay is given, and the spec has decay='head'"),
    ],
)
def test_wrong_layer_tensors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        layer_of(GDN, **changes)


def _called(change: str) -> None:
    """One call with one thing wrong; the slots must keep every bit."""
    layer, tokens = layer_of(GDN), draw_tokens(GDN, 5, 0)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
    metadata, before = batch_of(layer, [5], [5], [1]), cache.memory.clone()
    given = arguments(tokens)
    x = tokens.x
    changed = {
        "query": (0, lambda q: q[:, :1]),
        "flat": (1, lambda k: k.flatten(1)[:, 1:]),
        "value": (2, torch.Tensor.half),
        "decay": (3, lambda g: None),
        "decays": (3, torch.Tensor.double),
        "no query": (0, lambda q: None),
        "no value": (2, lambda v: None),
        "no beta": (4, lambda b: None),
        "beta": (4, lambda b: b[:, :2]),
        "beta list": (4, torch.Tensor.tolist),
        "negated": (4, lambda b: torch._neg_view(-b)),
    }  # fmt: skip
    if change in changed:
        place, function = changed[change]
        given[place] = function(given[place])
    if change == "rows":
        given = [part[:4] for part in given]
    if change == "cache":
        cache = attnlib.StateCache.allocate(GDN.replace(max_rollback=2), 4, device="cpu")
    if change == "metadata":
        metadata = object()
    if change == "gradient":
        given[0].requires_grad_(True)
    if change == "tangent":
        with torch.no_grad(), forward_ad.dual_level():
            given[0] = forward_ad.make_dual(given[0], torch.ones_like(given[0]))
            layer(*given, cache, metadata)
    try:
        if change == "no x":
            layer.convolve(None, cache, metadata)
        elif change == "output":
            layer(*given, cache, metadata, output=torch.empty(5, 63))
        elif change == "x":
            layer.convolve(x[:, 1:], cache, metadata)
        elif change == "in place":
            layer.convolve(x, cache, metadata)  # which leaves a plan
            before = cache.memory.clone()
            layer.convolve(x, cache, metadata, output=x)
        elif change == "over the value":
            layer(*given, cache, metadata, output=given[2])
        elif change == "over beta":
            memory = torch.rand(5, 64)
            given[4] = memory[:, 8:12]
            layer(*given, cache, metadata, output=memory)
        elif change == "in the slots":
            memory = cache.memory[2:].view(torch.float32).view(-1)[:320].view(5, 64)
            layer(*given, cache, metadata, output=memory)
        elif change == "shared rows":
            layer(*given, cache, metadata, output=torch.empty(100).as_strided((5, 64), (8, 1)))
        elif change == "in the keys":
            memory = torch.cat([torch.zeros(3), given[1].flatten(), torch.zeros(400)])
            given[1] = memory[3 : 3 + given[1].numel()].view_as(given[1])
            layer(*given, cache, metadata, output=memory[40 : 40 + given[2].numel()].view(5, -1))
        elif change == "no tensor":
            layer(*given, cache, metadata, output=[0.0])
        else:
            layer(*given, cache, metadata)
    finally:
        assert change == "cache" or torch.equal(cache.memory, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("query", r"query has shape \(5, 1, 16\); it must be \[tokens, 2, 16\]"),
        ("flat", r"key has shape \(5, 31\)"),
        ("value", "value is float16"),
        ("decay", "log_decay=None, and decay='head' has one per token"),
        ("decays", "log_decay is float64"),
        ("no query", "query of a state layer cannot be None: pass the rows"),
        ("no value", "value of a state layer cannot be None"),
        ("no x", "x of a state layer cannot be None"),
        ("output", r"output has shape \(5, 63\); it must be \[tokens, 64\]"),
        ("no beta", "beta is missing, and the spec has has_beta=True"),
        ("beta", r"beta is float32 \[5, 2\]; it must be float32 \[5, 4\]"),
        ("beta list", "beta is a list; it must be a torch.Tensor"),
        ("over beta", "output is in the memory of beta, which is read after rows"),
        ("in the slots", "output is in the memory of the slots: pass another tensor, or None"),
        ("shared rows", r"output has strides \(8, 16, 1\) for shape \(5, 4, 16\), so that tokens"),
        ("negated", r"beta is a view that torch negates.*resolve_neg"),
        ("rows", "the call has 4 rows, and the batch has 5 tokens"),
        ("cache", "was allocated for StateSpec"),
        ("metadata", "metadata is a object; a state layer needs the StateMetadata"),
        ("gradient", "requires a gradient"),
        ("tangent", "has a tangent of forward-mode gradients.*pass its primal"),
        ("x", r"x is float32 \[5, 23\]"),
        ("in place", "output is x"),
        ("over the value", "output is value, which is read after rows of the output are written"),
        ("in the keys", "output is in the memory of key, which is read after rows"),
        ("no tensor", "output is a list; it must be a torch.Tensor"),
    ],
)
def test_wrong_calls(change: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        _called(change)


@pytest.mark.parametrize("method", ["forward", "convolve"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("state_slots", 9, r"state_slots\[1\]=9 is outside the pool of 4 slots"),
        ("state_slots", 0, "state_slots"),
        ("query_start_loc", 7, "query_start_loc falls from 7"),
        ("seq_lens", 0, r"seq_lens\[1\]=0 is below the number of new tokens"),
    ],
)
def test_values_that_change_in_place_are_checked_again(
    method: str, name: str, value: int, message: str
) -> None:
    """T7, M1: also behind calls that passed the checks of the same batch."""
    layer, tokens = layer_of(GDN, backend="triton"), draw_tokens(GDN, 5, 0)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
    metadata = batch_of(layer, [3, 2], [3, 2], [0, 1])
    given = arguments(tokens) if method == "forward" else [tokens.x]
    call = getattr(layer, method)
    for _ in range(2):
        call(*given, cache, metadata)
    tensor, before = getattr(metadata, name), cache.memory.clone()
    kept = int(tensor[1])
    tensor[1] = value
    with pytest.raises(ContractError, match=message):
        call(*given, cache, metadata)
    assert torch.equal(cache.memory, before)
    tensor[1] = kept
    call(*given, cache, metadata)


NAN_CASES = [("torch", form, name) for name in KINDS for form in ("plain", "snapshots", "tail")]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy of the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("backend", "form", "name"), [*NAN_CASES, ("triton", "tail", "gated delta")]
)
def test_nan_reaches_its_chunk_and_can_be_taken_back(
    backend: str, form: str, name: str, value: float
) -> None:
    """T5: rows before its chunk keep every bit, as do rows and slot once it is replaced."""
    pytest.importorskip("triton")
    spec = KINDS[name].replace(form=form, max_rollback=0 if form == "plain" else 3)
    layer, tokens = layer_of(spec, backend=backend), draw_tokens(spec, 76, 0)
    early, late = tokens.each(torch.clone), tokens.each(torch.clone)
    for inputs, first in ((early, 66), (late, 70)):
        for tensor in inputs.tensors().values():
            tensor[first:72] = value

    def served(prefill: TokenInputs) -> list[torch.Tensor]:
        """Outputs of 72 tokens, the last two of which the next step replaces, and the slot."""
        cache = attnlib.StateCache.allocate(layer.spec, 1, device="cpu")
        cache.memory.fill_(0)
        results = []
        for first, inputs in ((0, prefill.rows(0, 72)), (70, tokens.rows(70, 73))):
            count = len(inputs)
            if first and form == "plain":
                break
            metadata = batch_of(layer, [count], [first + count], [0])
            if spec.has_convolution:
                results.append(layer.convolve(inputs.x, cache, metadata))
            if spec.has_recurrence:
                results.append(layer(*arguments(inputs), cache, metadata))
        return [*results, cache.memory]

    parts = spec.has_convolution + spec.has_recurrence
    clean, reached, replaced = map(served, (tokens, early, late))
    safe = 64 if layer.spec.form == "tail" and layer.spec.chunk_size == 16 else 66 - 63
    for got, wanted in zip(reached[:parts], clean, strict=False):
        assert torch.equal(got[:safe], wanted[:safe]) and not got[66:72].isfinite().all()
    if form != "plain":
        for got, wanted in zip(replaced[parts:-1], clean[parts:-1], strict=True):
            assert torch.equal(got, wanted)
        exported = [layer.spec, replaced[-1]], [layer.spec, clean[-1]]
        decay = layer.log_decay
        states = [attnlib.StateCache(*one).export([0], [73], log_decay=decay) for one in exported]
        for got, wanted in zip(*states, strict=True):
            assert got is wanted is None or torch.equal(got, wanted)


def test_a_convolution_alone_has_no_recurrence() -> None:
    spec = KINDS["short convolution"]
    layer = layer_of(spec)
    cache = attnlib.StateCache.allocate(layer.spec, 2, device="cpu")
    metadata = batch_of(layer, [1], [1], [0])
    with pytest.raises(ContractError, match="call layer.convolve"):
        layer(*[torch.zeros(1, 1)] * 5, cache, metadata)
    other = layer_of(KINDS["gla"])
    cache = attnlib.StateCache.allocate(other.spec, 2, device="cpu")
    with pytest.raises(ContractError, match="it has no convolution"):
        other.convolve(torch.zeros(1, 0), cache, metadata)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_slots_outside_the_cache(backend: str) -> None:
    """T7: on a CPU no backend writes past the slots; sources too, and slots of two requests."""
    pytest.importorskip("triton")
    spec = StateSpec(num_heads=2, key_size=16, value_size=16, dtype=torch.float32, max_rollback=1)
    layer = attnlib.StateLayer(spec, backend=backend, device="cpu")
    cache = attnlib.StateCache.allocate(layer.spec, num_slots=4, device="cpu")
    before = cache.memory.clone()
    tokens = [torch.randn(3, 32) for _ in range(3)]
    for slots, sources, message in (
        ([9], None, r"state_slots\[0\]=9 is outside the pool of 4 slots"),
        ([1], [7], r"state_sources\[0\]=7 is outside the pool of 4 slots"),
    ):
        batch = attnlib.CommonAttentionMetadata.from_lengths(
            [3], [5], device="cpu", state_slots=slots, state_sources=sources
        )
        metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, batch)
        with pytest.raises(ContractError, match=message):
            layer(*tokens, -torch.rand(3, 2), torch.rand(3, 2), cache, metadata)
        assert torch.equal(cache.memory, before)


CHANGES = [
    ("query_start_loc", [0, 3, 2], r"query_start_loc falls from 3 to 2"),
    ("query_start_loc", [0, 2, 9], r"query_start_loc ends at 9, past the 3 rows"),
    (
        "query_start_loc",
        [0, 3, 3],
        r"query_start_loc has 3 rows of one request, and max_query_len=2",
    ),
    ("seq_lens", [1, 1], r"seq_lens\[0\]=1 is below the number of new tokens, 2"),
    ("state_slots", [1, 9], r"state_slots\[1\]=9 is outside the pool of 4 slots"),
    ("state_slots", [1, -2], r"state_slots\[1\]=-2 is outside the pool of 4 slots"),
    ("state_slots", [1, 1], r"state_slots\[0\] and state_slots\[1\] are both 1"),
]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("name", "values", "message"), CHANGES)
@pytest.mark.parametrize("call", ["first", "repeated", "other slots"])
def test_batches_that_change_in_place(
    backend: str, name: str, values: list[int], message: str, call: str
) -> None:
    """On a CPU, starts, lengths and slots are checked in every call, before anything is written."""
    pytest.importorskip("triton")
    spec = GDN.replace(conv_channels=64)
    layer = layer_of(spec, backend=backend)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
    metadata, tokens = batch_of(layer, [2, 1], [2, 1], [1, 2]), draw_tokens(spec, 3, 0)
    if call != "first":
        layer.convolve(tokens.x, cache, metadata)
        layer(*arguments(tokens), cache, metadata)
    if call == "other slots":
        metadata = metadata.with_slots(metadata.state_slots.clone())
    before = cache.memory.clone()
    getattr(metadata, name).copy_(torch.tensor(values))
    for run in (
        lambda: layer.convolve(tokens.x, cache, metadata),
        lambda: layer(*arguments(tokens), cache, metadata),
    ):
        with pytest.raises(ContractError, match=message):
            run()
    assert torch.equal(cache.memory, before)


@pytest.mark.parametrize("form", ["plain", "snapshots", "tail"])
def test_a_stale_state_is_refused_before_the_window_changes(form: str) -> None:
    """T8: a step in which the recurrence did not run."""
    spec = KINDS["gated delta"].replace(form=form)
    layer, tokens = layer_of(spec, backend="torch"), draw_tokens(spec, 7, 0)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
    first = batch_of(layer, [5], [5], [2])
    layer.convolve(tokens.x[:5], cache, first)
    layer(*arguments(tokens.rows(0, 5)), cache, first)
    layer.convolve(tokens.x[5:6], cache, batch_of(layer, [1], [6], [2]))
    before = cache.memory.clone()
    with pytest.raises(ContractError, match="the state in slot 2 can continue from 5 to 5"):
        layer.convolve(tokens.x[6:], cache, batch_of(layer, [1], [7], [2]))
    assert torch.equal(cache.memory, before)


def test_a_first_step_reads_no_source() -> None:
    """T1, T12: whatever `state_sources` holds there."""
    layer, tokens = layer_of(GDN.replace(form="tail")), draw_tokens(GDN, 5, 3)
    found = []
    for sources in (None, torch.tensor([99]), torch.tensor([-3])):
        cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
        metadata = batch_of(layer, [5], [5], [2])
        if sources is not None:
            metadata = metadata.with_slots(metadata.state_slots, sources.int())
        layer.convolve(tokens.x, cache, metadata)
        found.append(layer(*arguments(tokens), cache, metadata))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_positions_are_checked_in_every_call() -> None:
    """Also in one whose plan is known."""
    layer, tokens = layer_of(GDN), draw_tokens(GDN, 2, 0)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
    metadata = batch_of(layer, [2], [2], [1])
    layer(*arguments(tokens), cache, metadata)
    later = batch_of(layer, [2], [9], [1])
    for _ in range(2):
        with pytest.raises(ContractError, match=r"continues from 7 tokens.*from 0 to 2"):
            layer(*arguments(tokens), cache, later)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (3, 0.5, r"log_decay\[1\]\[2\]=0.5 must be finite and at most 0"),
        (3, -torch.inf, r"log_decay\[1\]\[2\]=-inf"),
        (4, 2.5, r"beta\[1\]\[2\]=2.5 must be finite and from 0 to 2"),
        (4, -0.1, r"beta\[1\]\[2\]=-0.1"),
    ],
)
def test_validation_of_gates(
    place: int, value: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, tokens = layer_of(GDN), draw_tokens(GDN, 3, 0)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
    given = arguments(tokens)
    given[place][1, 2] = value
    layer(*given, cache, batch_of(layer, [3], [3], [0]))
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    before = cache.memory.clone()
    with pytest.raises(ContractError, match=message):
        layer(*given, cache, batch_of(layer, [3], [3], [1]))
    assert torch.equal(cache.memory, before)
    layer(*given, cache, batch_of(layer, [1], [1], [1]))  # rows past the batch are not gates


def test_validation_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call reads them, as it does on a GPU, where nothing else checks them."""
    layer, tokens = layer_of(GDN), draw_tokens(GDN, 3, 0)
    monkeypatch.setattr("attnlib.layer.state_checks.check_requests", lambda *batch: None)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
    metadata = batch_of(layer, [2, 1], [2, 1], [1, 2])
    layer.convolve(tokens.x, cache, metadata)
    layer(*arguments(tokens), cache, metadata)
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    metadata.query_start_loc[1] = 0
    with pytest.raises(ContractError, match=r"seq_lens\[1\]=1 is below the 3 new tokens"):
        layer.convolve(tokens.x, cache, metadata)
    metadata.seq_lens[1] = 3
    with pytest.raises(ContractError, match="max_query_len=2 is below the length 3 of request 1"):
        layer(*arguments(tokens), cache, metadata)


def test_the_spec_cannot_be_assigned() -> None:
    """Its impl was made for the one that it has."""
    layer = layer_of(GDN)
    with pytest.raises(ContractError, match="spec of layer .* cannot be assigned"):
        layer.spec = GDN.replace(max_rollback=0)


def test_copies_of_a_layer() -> None:
    layer, tokens = layer_of(GDN), draw_tokens(GDN, 3, 0)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")
    wanted = layer.convolve(tokens.x, cache, batch_of(layer, [3], [3], [0]))
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.impl.owner is copied and copied.handle != layer.handle
        with torch.no_grad():
            copied.conv_weight.zero_()
        metadata = batch_of(layer, [3], [3], [1])
        assert not copied.convolve(tokens.x, cache, metadata).any()
        assert torch.equal(layer.convolve(tokens.x, cache, batch_of(layer, [3], [3], [2])), wanted)


def test_parameters_stay_parameters() -> None:
    weight = torch.nn.Parameter(torch.ones(24, 4), requires_grad=False)
    layer = layer_of(GDN, conv_weight=weight, prefix="model.0")
    assert layer.conv_weight is weight and list(layer.state_dict()) == ["conv_weight"]
    assert repr(layer).startswith("StateLayer(model.0, StateSpec(num_heads=4")


@pytest.mark.slow
def test_torch_compile() -> None:
    """The whole step in one graph; another batch and other slots do not compile again."""
    layer = layer_of(GDN)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device="cpu")

    def run(tokens: TokenInputs, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = layer.convolve(tokens.x * 1.0, cache, metadata)
        return x, layer(*arguments(tokens), cache, metadata)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    steps = [([2, 0], [2, 0], [3, -1]), ([1, 1], [3, 1], [3, 0]), ([1, 1], [4, 2], [3, 0])]
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for number, step in enumerate(steps):
            tokens, metadata = draw_tokens(GDN, 2, number), batch_of(layer, *step)
            before = cache.memory.clone()
            wanted = run(tokens, metadata)
            after = cache.memory.clone()
            cache.memory.copy_(before)
            got = compiled(tokens, metadata)
            assert all(map(torch.equal, got, wanted)) and torch.equal(cache.memory, after)


@pytest.mark.parametrize("name", KINDS)
def test_warmup_changes_no_slot(name: str) -> None:
    layer = layer_of(KINDS[name])
    cache = attnlib.StateCache.allocate(layer.spec, 3, device="cpu")
    before = cache.memory.clone()
    limits = attnlib.BatchLimits(max_num_reqs=3, max_num_tokens=8, max_seq_len=32)
    report = attnlib.warmup(layer, cache, limits)
    assert (1,) in report.batches and max(map(sum, report.batches)) == 8
    assert torch.equal(cache.memory, before)
    with pytest.raises(ContractError, match="needs its slots"):
        attnlib.warmup(layer, None, limits)


def test_the_report_of_a_warmup_counts_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those found on disk and those compiled, as of attention layers."""
    found = [CompiledKernel("a", False, True), CompiledKernel("b", False)] * 2
    module = importlib.import_module("attnlib.layer.warmup")
    monkeypatch.setattr(module, "_new_kernels", lambda device: nullcontext(found[1:]))
    layer = layer_of(KINDS["gated delta"])
    cache = attnlib.StateCache.allocate(layer.spec, 3, device="cpu")
    limits = attnlib.BatchLimits(max_num_reqs=1, max_num_tokens=2, max_seq_len=8)
    report = attnlib.warmup(layer, cache, limits)
    assert (report.kernels_found, report.kernels_compiled) == (1, 2)
