"""What is prepared for chunks of long steps, against the rules in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlib.ops.states import RecurrenceParams, StateBatch, StateInputs, StateLayout, StateTensors
from attnlib.ops.triton.hopper.kernels.state_channel_chunks import channel_matrices_kernel
from attnlib.ops.triton.hopper.kernels.state_long import long_matrices_kernel
from attnlib.ops.triton.states import state_step
from attnlib.ops.triton.states.launch import KernelLaunch
from tests.ops.triton.test_states_long_step import DEVICE, long_steps

__all__ = ["long_steps"]

LIMIT = 4e-5
"""Largest error of numbers of 16 bits, relative to the largest of their kind."""
SCALE = 0.1
KERNELS = {"channel": channel_matrices_kernel, "head": long_matrices_kernel}
TOKENS = 70
CHUNKS = ((0, 32), (32, 64), (64, 70))

DECAYS: dict[str, Callable[..., Tensor]] = {
    "weak": lambda *shape: -torch.rand(shape) / 8,
    "bounded": lambda *shape: torch.full(shape, -5.0),  # 40 in eight tokens
    "strong": lambda *shape: -(torch.rand(shape) ** 3) * 40,
    "mixed": lambda *shape: -torch.rand(shape) * torch.tensor([0.01, 30.0]).repeat(shape[-1] // 2),
    "forgetting": lambda *shape: (
        -torch.where(
            torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) % 11 == 3,
            1e30,
            torch.rand(shape),
        )
    ),
}
"""Name -> logarithms; the sums of some have no digits left for those of weak decays (T5)."""


def prepared(monkeypatch: pytest.MonkeyPatch, layout: StateLayout, inputs: StateInputs) -> Any:
    """The configuration of a first step, its planes and factors."""
    found: list[Any] = []

    class Noted(KernelLaunch):
        def __init__(self, kernel: Any, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(kernel, config, *args, **options)
            self.config = config if kernel is KERNELS[layout.decay] else None

        def run(self, *tensors: Tensor) -> None:
            if self.config is not None:
                for memory in tensors[-2:]:
                    memory.fill_(torch.nan)
                super().run(*tensors)
                found.extend([self.config, *(x.cpu().double() for x in tensors[-2:])])

    monkeypatch.setattr(state_step, "KernelLaunch", Noted)
    memory = torch.zeros(2, layout.bytes_per_slot, dtype=torch.uint8, device=DEVICE)
    starts = torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE)
    batch = StateBatch(
        query_start_loc=starts,
        seq_lens=starts[1:],
        slots=torch.ones_like(starts[1:]),
        max_query_len=TOKENS,
    )
    params = RecurrenceParams(
        scale=SCALE,
        update="add" if inputs.beta is None else "delta",
        qk_norm=inputs.beta is not None,
        is_invariant=False,
    )
    inputs = inputs.each(lambda x: x.to(DEVICE))
    out = torch.empty_like(inputs.value)
    state_step.state_step(inputs, StateTensors.from_bytes(layout, memory), batch, params, out=out)
    return found


def full(x: Tensor) -> Tensor:
    """The rows of a chunk in float64, 0 behind the last one."""
    return torch.cat([x.double(), x.new_zeros(32 - len(x), *x.shape[1:]).double()])


def wanted(q: Tensor, k: Tensor, decay: Tensor, beta: Tensor | None) -> dict[str, Tensor]:
    """Those of one chunk and head: matrices, rows for the keys that a state holds, for outputs and
    for the next state, and the decays of the state."""
    total = full(decay.clamp(min=-104)).cumsum(0).expand(32, q.shape[1])
    strength = torch.ones(32, 1).double() if beta is None else full(beta)[:, None]
    q, k = full(q), full(k)
    if beta is not None:
        q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    is_lower = torch.ones(32, 32).tril().bool()[..., None]
    pair = torch.where(is_lower, total[:, None] - total[None], -torch.inf).exp()
    found = {
        "seen": k * strength * total.exp(),
        "read": q * SCALE * total.exp(),
        "kept": k * (total[-1:] - total).exp(),
        "end": total[-1].exp(),
        "P": torch.einsum("ic,jc,ijc->ij", q * SCALE, k, pair),
    }
    if beta is None:
        del found["seen"]
    else:
        pairs = torch.einsum("ic,jc,ijc->ij", k * strength, k, pair).tril(-1)
        found["T"] = torch.linalg.inv(torch.eye(32).double() + pairs)
    return found


def stored(
    config: Any, plane: Tensor, factors: Tensor, q: Tensor, k: Tensor, is_channel: bool
) -> dict[str, Tensor]:
    """The same of a chunk that was prepared; factors of rows times the rows."""
    names = ["P", "T"] if config.DELTA else ["P"]
    sizes = [(32, 32)] * len(names)
    if is_channel:
        names, sizes = [*names, "seen", "read", "kept"], [*sizes, *[(32, config.PART)] * 3]
    parts = plane.split([2 * rows * columns for rows, columns in sizes])
    found = {
        name: part.view(2, *size).sum(0)
        for name, size, part in zip(names, sizes, parts, strict=True)
    }
    if is_channel:
        return found | {"end": factors[32 : 32 + config.PART]}
    factors = factors.view(5, 32)
    rows = {"seen": full(k), "read": full(q), "kept": full(k)}
    found |= {name: factors[1 + n, :, None] * x for n, (name, x) in enumerate(rows.items())}
    return found | {"end": factors[4, 0].expand(config.PART)}


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(
    ("update", "size", "unit"),
    [("delta", 64, 16), ("delta", 128, 16), ("add", 64, 16), ("delta", 64, 32)],
)
def test_prepared_chunks(
    decays: str, kind: str, update: str, size: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T2, T5: matrices and rows of full chunks and of one of six tokens."""
    torch.manual_seed(0)
    is_channel = kind == "channel"
    q, k = (torch.randn(TOKENS, 1, size).bfloat16() for _ in range(2))
    k = k if update == "delta" else (k * size**-0.5).bfloat16()
    decay = DECAYS[decays](TOKENS, 2, *([size] if is_channel else []))
    beta = torch.rand(TOKENS, 2) * 2 if update == "delta" else None
    layout = StateLayout(
        form="tail",
        num_heads=2,
        num_key_heads=1,
        key_size=size,
        value_size=64,
        decay=kind,
        has_beta=beta is not None,
        conv_channels=0,
        conv_width=0,
        dtype=torch.bfloat16,
        state_dtype=torch.float32,
        max_rollback=0,
        chunk_size=unit,
    )
    value = torch.zeros(TOKENS, 2, 64).bfloat16()
    inputs = StateInputs(q, k, value, decay, beta)
    config, planes, factors = prepared(monkeypatch, layout, inputs)
    for chunk, (first, stop) in enumerate(CHUNKS):
        for head in range(2):
            rows, one = (q[first:stop, 0], k[first:stop, 0]), slice(first, stop)
            strength = None if beta is None else beta[one, head]
            expected = wanted(*rows, decay[one, head].view(stop - first, -1), strength)
            arguments = planes[chunk, head], factors[chunk, head], *rows, is_channel
            found = stored(config, *arguments)
            for name, right in expected.items():
                error = (found[name] - right).abs().max() / right.abs().max().clamp(min=1e-30)
                assert error < LIMIT, (chunk, head, name, error)
