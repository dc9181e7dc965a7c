"""The causal convolution before a recurrence, over a batch (T6). One program per tile of tokens and
block of channels.

Row p % RING of a window belongs to position p. Only the first tile of a request reads the window,
because a tile has at least W - 1 tokens, and the same program then writes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.state_arguments import StateBatch, numbers
from attnlib.ops.triton.kernels.state_requests import open_request

__all__ = [
    "ConvolutionConfig",
    "Inputs",
    "convolve",
    "load_inputs",
    "load_taps",
    "short_convolution_kernel",
    "write_window",
]


class ConvolutionConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        C, W: channels and taps.
        D: tokens that can be taken back.
        RING: rows of a window.
        TOKENS, CHANNELS: tokens and channels of a program.
        HAS_BIAS, SILU: bias and activation.
        X_T, O_T, W_C, W_W: strides of tokens of the inputs and outputs, of channels and taps of the
            weight.
        WINDOW, POSITIONS: strides of slots.
    """

    C: int
    W: int
    D: int
    RING: int
    TOKENS: int
    CHANNELS: int
    HAS_BIAS: bool
    SILU: bool
    X_T: int
    O_T: int
    W_C: int
    W_W: int
    WINDOW: int
    POSITIONS: int


class Inputs(NamedTuple):
    """Inputs of a block of channels: pointers to those of a request's first token and to the source
    window, the position of the first token, and whether the channels exist."""

    x: Any
    window: Any
    computed: Any
    inside: Any


@triton.jit
def _load_pair(inputs, position, exists, CONFIG: tl.constexpr):
    """Return the inputs [N, CHANNELS] at positions [N] in the window and in the step, or 0, and
    which are in the step."""
    fresh = exists & (position >= inputs.computed)
    held = exists & (position >= 0) & (position < inputs.computed)
    token = (position - inputs.computed).to(tl.int64)[:, None] * CONFIG.X_T
    row = (tl.maximum(position, 0) % CONFIG.RING).to(tl.int64)[:, None] * CONFIG.C
    a = tl.load(inputs.window + row, mask=held[:, None] & inputs.inside, other=0.0)
    b = tl.load(inputs.x + token, mask=fresh[:, None] & inputs.inside, other=0.0)
    return a, b, fresh


@triton.jit
def _chosen(pair):
    """Return the inputs of a pair."""
    return tl.where(pair[2][:, None], pair[1], pair[0])


@triton.jit
def load_inputs(inputs, position, exists, CONFIG: tl.constexpr):
    """Return the pairs of `_load_pair` for each tap of the outputs at positions [N]."""
    W: tl.constexpr = CONFIG.W
    return [_load_pair(inputs, position - (W - 1 - tap), exists, CONFIG) for tap in numbers(W)]


@triton.jit
def load_taps(weight, bias, channels, CONFIG: tl.constexpr):
    """Return the weights [CHANNELS] of each tap, and the bias behind them, if there is one."""
    inside = channels < CONFIG.C
    places = [weight + channels * CONFIG.W_C + tap * CONFIG.W_W for tap in numbers(CONFIG.W)]
    if CONFIG.HAS_BIAS:
        places = places + [bias + channels]
    return [tl.load(place, mask=inside, other=0.0) for place in places]


@triton.jit
def convolve(pairs, taps, CONFIG: tl.constexpr):
    """Return the outputs [N, CHANNELS] float32 of what `load_inputs` and `load_taps` return. Each
    has one order of its sum."""
    total = _chosen(pairs[0]).to(tl.float32) * taps[0].to(tl.float32)[None, :]
    for tap in tl.static_range(1, len(pairs)):
        total = total + _chosen(pairs[tap]).to(tl.float32) * taps[tap].to(tl.float32)[None, :]
    if CONFIG.HAS_BIAS:
        total = total + taps[len(pairs)].to(tl.float32)[None, :]
    if CONFIG.SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def write_window(request, end, inputs, window, positions, channels, zero, CONFIG: tl.constexpr):
    """Write what the next step may need of the last inputs, D + W - 1 of them, to the window, but
    not those from position `end` on. `zero` is a tensor [1]."""
    low = tl.maximum(request.computed, request.end - CONFIG.D)
    first = tl.maximum(low - (CONFIG.W - 1), 0)
    if request.source == request.slot:
        first = tl.maximum(first, request.computed)
    for position in range(first, end):
        at = position + zero
        x = _chosen(_load_pair(inputs, at, at >= 0, CONFIG))
        place = window + request.slot * CONFIG.WINDOW + position % CONFIG.RING * CONFIG.C
        tl.store(place + channels[None, :], x, mask=inputs.inside)
    if tl.program_id(1) == 0:
        place = positions + request.slot * CONFIG.POSITIONS
        tl.store(place, low)
        tl.store(place + 1, request.end)


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "num_tiles"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "slots", "sources"],
)
def short_convolution_kernel(
    x,
    weight,
    bias,
    out,
    window,
    positions,
    query_start_loc,
    seq_lens,
    slots,
    sources,
    num_reqs,
    num_tokens,
    num_tiles,
    CONFIG: tl.constexpr,
):
    """Convolve a tile of tokens of one request. CONFIG is a `ConvolutionConfig`.

    Grid: (num_tiles, blocks of channels). Rows after the last request become 0.
    """
    tile = tl.program_id(0)
    channels = tl.program_id(1) * CONFIG.CHANNELS + tl.arange(0, CONFIG.CHANNELS)
    inside = (channels < CONFIG.C)[None, :]
    number = find_request(query_start_loc, tile, num_reqs, CONFIG.TOKENS, 128)
    start = tl.load(query_start_loc + number)
    first = (tile - (start // CONFIG.TOKENS + number)) * CONFIG.TOKENS
    token = first + tl.arange(0, CONFIG.TOKENS)
    place = out + (start + token).to(tl.int64)[:, None] * CONFIG.O_T + channels[None, :]
    zeros = tl.full([CONFIG.TOKENS, CONFIG.CHANNELS], 0.0, out.dtype.element_ty)
    if number == num_reqs:
        tl.store(place, zeros, mask=(start + token < num_tokens)[:, None] & inside)
        return
    request = open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    exists = token < request.count
    if first >= request.count:
        return
    if request.slot < 0:
        tl.store(place, zeros, mask=exists[:, None] & inside)
        return
    inputs = Inputs(
        x + start.to(tl.int64) * CONFIG.X_T + channels[None, :],
        window + request.source * CONFIG.WINDOW + channels[None, :],
        request.computed,
        inside,
    )
    position = request.computed + token
    pairs = load_inputs(inputs, position, exists, CONFIG)
    result = convolve(pairs, load_taps(weight, bias, channels, CONFIG), CONFIG)
    tl.store(place, result.to(out.dtype.element_ty), mask=exists[:, None] & inside)
    if first == 0:
        # Other threads of the program may still read rows that are written now.
        tl.debug_barrier()
        given = inputs, window, positions, channels, tl.arange(0, 1)
        write_window(request, request.end, *given, CONFIG)
