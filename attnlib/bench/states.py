"""The suite `states`: decodes, verification and prefills of state layers, beside their byte bounds.

A decode depends on the length of its tail, so a timing goes over one whole chunk: every call
continues from another position, in slots of its own. The bound of a call counts what a step in the
tail form must read and write once: the state and the tail, the new inputs, the outputs, and the
state again where a chunk is full.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnlib.bench.peaks import measure_peaks
from attnlib.bench.provenance import provenance
from attnlib.bench.state_steps import step_call, step_fields, surrounding_bytes
from attnlib.bench.timer import EagerTimer, GraphTimer, measure_in_turn, warm_up
from attnlib.cache.states import StateCache
from attnlib.device import resolve_device
from attnlib.layer import StateLayer
from attnlib.metadata import CommonAttentionMetadata
from attnlib.selection import list_backends, load_backend, use_backend
from attnlib.spec import CudaGraphSupport, StateSpec

__all__ = ["STATE_CASES", "StateCase", "measure_states", "step_bytes"]

_MODELS: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "num_heads": 32,
        "num_key_heads": 16,
        "key_size": 128,
        "value_size": 128,
        "qk_norm": True,
    },
    "kimi-linear": {
        "num_heads": 32,
        "key_size": 128,
        "value_size": 128,
        "decay": "channel",
        "qk_norm": True,
    },
    "nemotron-h": {
        "num_heads": 128,
        "num_key_heads": 8,
        "key_size": 128,
        "value_size": 64,
        "update": "add",
    },
}


@dataclass(frozen=True)
class StateCase:
    """A batch of requests with equal lengths over a model's state layer.

    Attributes:
        model: one of Qwen3-Next, Kimi Linear and Nemotron-H.
        num_reqs: requests.
        query_len: new tokens of each.
        drafts: whether they are a token and its drafts; else a prompt.
        is_step: from convolution to norm, in one launch and in separate ones.
    """

    model: str
    num_reqs: int
    query_len: int
    drafts: bool = True
    is_step: bool = False

    @property
    def name(self) -> str:
        """Such as `qwen3-next-decode-64x1`."""
        decode = "step" if self.is_step else "verify" if self.query_len > 1 else "decode"
        kind = decode if self.drafts else "prefill"
        return f"{self.model}-{kind}-{self.num_reqs}x{self.query_len}"

    @property
    def spec(self) -> StateSpec:
        """The layer, in bfloat16 with float32 states."""
        fields = _MODELS[self.model]
        return StateSpec(
            **(step_fields(fields) if self.is_step else fields),
            dtype=torch.bfloat16,
            max_rollback=self.query_len - 1 if self.drafts else 0,
        )


STATE_CASES = tuple(
    StateCase(model, num_reqs, query_len, drafts)
    for model in _MODELS
    for num_reqs, query_len, drafts in (
        *((num_reqs, query_len, True) for query_len in (1, 4) for num_reqs in (1, 32, 64, 256)),
        *((n, length, False) for n, length in ((1, 8192), (8, 1024), (1, 32768), (32, 128))),
    )
) + tuple(StateCase(model, n, 1, is_step=True) for model in _MODELS for n in (1, 64))
"""Decodes and verification of 1 to 256 requests, prefills, and steps from convolution to norm."""


def step_bytes(spec: StateSpec, computed: int, query_len: int) -> int:
    """Bytes that a step of one request must move in the tail form.

    Args:
        spec: of the layer, with a chunk size.
        computed: tokens before the step, all of which stay; those since the last full chunk are in
            the tail.
        query_len: new tokens.
    """
    assert spec.chunk_size is not None
    size, chunk, end = spec.dtype.itemsize, spec.chunk_size, computed + query_len
    state = spec.num_heads * spec.key_size * spec.value_size * spec.state_dtype.itemsize
    channels = {"head": 1, "channel": spec.key_size, "constant": 0}[spec.decay]
    keys, values = spec.num_key_heads * spec.key_size, spec.num_heads * spec.value_size
    gates = 4 * spec.num_heads * (channels + spec.has_beta)
    row = size * (keys + values) + gates
    base = computed // chunk * chunk
    kept = max(computed, end - spec.max_rollback) // chunk * chunk
    written = end - max(kept, computed)
    moved = (computed - base + query_len + written) * row + query_len * size * (keys + values)
    return moved + state * ((base > 0) + (kept > base))


class _Work(NamedTuple):
    """Calls of one case on one backend: how many different ones, and the bytes of each."""

    call: Callable[[int], object]
    copies: int
    bytes_per_call: float


def _prepare(
    case: StateCase, backend: str, device: torch.device, *, separate: bool = False
) -> _Work:
    spec = case.spec
    weight = torch.randn(spec.conv_channels, spec.conv_width, device=device).to(spec.dtype)
    with use_backend(backend):
        layer = StateLayer(spec, device=device, conv_weight=weight if case.is_step else None)
    spec = layer.spec
    copies = (spec.chunk_size or 16) if case.drafts else 1
    cache = StateCache.allocate(spec, copies * case.num_reqs, device=device)
    tokens, builder = case.num_reqs * case.query_len, layer.backend.make_builder(spec, device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, device=device)

    query, key = (normal(spec.num_key_heads, spec.key_size).to(spec.dtype) for _ in range(2))
    value = normal(spec.num_heads, spec.value_size).to(spec.dtype)
    decays = (spec.num_heads, spec.key_size) if spec.decay == "channel" else (spec.num_heads,)
    decay, beta = -normal(*decays).abs() / 8, normal(spec.num_heads).sigmoid()
    output = torch.empty_like(value)
    batches, moved = [], 0
    for copy in range(copies):
        before = 1024 + copy if case.drafts else 0
        slots = list(range(copy * case.num_reqs, (copy + 1) * case.num_reqs))
        if before:
            _fill(cache, slots, before, spec.max_rollback)
        common = CommonAttentionMetadata.from_lengths(
            [case.query_len] * case.num_reqs,
            [before + case.query_len] * case.num_reqs,
            device=device,
            state_slots=slots,
        )
        batches.append(builder.build(0, common))
        moved += case.num_reqs * step_bytes(spec, before, case.query_len)
        if case.is_step:
            moved += case.num_reqs * surrounding_bytes(spec, case.query_len)
    if case.is_step:
        step = step_call(layer, cache, batches, tokens, separate=separate)
        return _Work(step, copies, moved / copies)

    def call(copy: int) -> object:
        return layer(query, key, value, decay, beta, cache, batches[copy], output=output)

    return _Work(call, copies, moved / copies)


def _fill(cache: StateCache, slots: list[int], high: int, rollback: int) -> None:
    """Give slots a state and a tail as after a step, with which a step can continue from `high`."""
    tensors, rows = cache.tensors, slice(slots[0], slots[-1] + 1)
    assert tensors.positions is not None and tensors.state is not None
    for field in (tensors.state, tensors.tail_key, tensors.tail_value):
        if field is not None:
            field[rows].normal_()
    if tensors.tail_log_decay is not None:
        tensors.tail_log_decay[rows] = -0.1
    if tensors.tail_beta is not None:
        tensors.tail_beta[rows] = 0.5
    if tensors.window is not None:
        tensors.window[rows].normal_()
    for positions in (tensors.positions, tensors.window_positions):
        if positions is not None:
            positions[rows, ..., 0], positions[rows, ..., 1] = high - rollback, high


def _rows(case: StateCase, backends: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """The results of a case. Backends that no graph can capture are timed without one."""
    facts, works, graphs = resolve_device(device), {}, {}
    captured = case.spec.replace(cudagraph=CudaGraphSupport.ALWAYS)
    for name in backends:
        backend = load_backend(name)
        if not (backend.unavailable(facts) or backend.state_reasons(case.spec, facts)):
            works[name] = _prepare(case, name, device)
            if case.is_step:
                works[f"{name}, separate"] = _prepare(case, name, device, separate=True)
            graphs[name] = graphs[f"{name}, separate"] = (
                device.type == "cuda" and not backend.state_reasons(captured, facts)
            )
    expected = {name: warm_up(work.call, device) for name, work in works.items()}
    timers = {
        name: (GraphTimer if graphs[name] else EagerTimer)(
            work.call, work.copies, device, expected[name]
        )
        for name, work in works.items()
    }
    for name, found in measure_in_turn(timers, expected).items():
        facts_of = {"bytes": works[name].bytes_per_call, "graph": graphs[name]}
        yield {"case": case.name, "backend": name, **asdict(found), **facts_of}


def measure_states(
    patterns: list[str], backends: list[str], device: torch.device, target: str | None, command: str
) -> int:
    """Measure the cases whose names contain one of the patterns, print a line each, and write a
    JSON document.

    Returns:
        The exit status: 1 if no case was measured.
    """
    chosen = [c for c in STATE_CASES if not patterns or any(p in c.name for p in patterns)]
    names = backends or [name for name in list_backends() if name != "torch"]
    peaks, rows = measure_peaks(device), []
    print(f"{'case':34} {'backend':16} {'us':>9} {'bound us':>9} {'share':>6}")
    for case in chosen:
        for row in _rows(case, names, device):
            bound = row["bytes"] / peaks.copy_gbps / 1e3
            row |= {"bound_us": bound, "share": bound / row["us"]}
            rows.append(row)
            print(
                f"{row['case']:34} {row['backend']:16} {row['us']:9.1f} {bound:9.1f} "
                f"{100 * row['share']:5.0f}%",
                flush=True,
            )
        if target:
            facts = {"run": provenance(command, None, device), "peaks": peaks.to_json()}
            Path(target).write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0 if rows else 1
