"""The figure of the forms of a slot (T9) in docs/states.md, from `StateLayout`."""

from __future__ import annotations

import torch

from attnlib.cache.states import state_layout
from attnlib.spec import StateSpec

BEFORE, AFTER, ROLLBACK = 20, 23, 3
"""Tokens of the request before and after the step of the figure, and D."""
LEFT, CELL, ROW, TOP = 118, 24, 78, 58
LAYER = StateSpec(
    num_heads=32,
    num_key_heads=16,
    key_size=128,
    value_size=128,
    qk_norm=True,
    conv_channels=8192,
    conv_width=4,
    dtype=torch.bfloat16,
)
"""A layer of Qwen3-Next, for the bytes of a slot."""


def figure() -> str:
    """The SVG: a row per form, with the states and inputs that a slot holds."""
    width, height = LEFT + CELL * AFTER + 40, TOP + 3 * ROW + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(10, 22, f"A slot after a step from {BEFORE} to {AFTER} tokens, chunks of 16 tokens"),
    ]
    parts += [_text(_x(p), 46, str(p), "middle") for p in sorted({0, 8, 16, BEFORE, AFTER})]
    for row, form in enumerate(("plain", "snapshots", "tail")):
        parts += _row(form, TOP + row * ROW)
    y = height - 14
    parts += [
        _state(LEFT, y - 4),
        _text(LEFT + 12, y, "state after this many tokens"),
        _cell(LEFT + 212, y - 14, 16, "#56b4e9"),
        _text(LEFT + 234, y, "inputs of a token"),
        _line(LEFT + 362, LEFT + 386, y - 4),
        _text(LEFT + 392, y, "may continue from here"),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(form: str, y: int) -> list[str]:
    """One form: tokens, held inputs, held states, and where the next step may begin."""
    layout = state_layout(
        LAYER.replace(form=form, max_rollback=0 if form == "plain" else ROLLBACK, chunk_size=16)
    )
    low = layout.first_kept(BEFORE, AFTER) if form != "plain" else AFTER
    first = layout.chunk_start(low) if form == "tail" else AFTER
    states = [first] if form == "tail" else range(low, AFTER + 1)
    colors = ["#56b4e9" if p >= first else "#eeeeee" for p in range(AFTER)]
    return [
        _text(10, y + 20, form),
        _text(10, y + 36, f"{layout.bytes_per_slot / 2**20:.2f} MiB", color="#555555"),
        *(_cell(_x(p), y + 6, CELL, color) for p, color in enumerate(colors)),
        *(_state(_x(p), y + 16) for p in states),
        _line(_x(low) - 6, _x(AFTER) + 6, y + 40),
    ]


def _x(position: int) -> int:
    return LEFT + CELL * position


def _text(x: int, y: int, text: str, anchor: str = "start", color: str = "#000000") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{text}</text>'


def _cell(x: int, y: int, width: int, color: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="20" fill="{color}" stroke="#999999"/>'


def _state(x: int, y: int) -> str:
    return f'<circle cx="{x}" cy="{y}" r="7" fill="#d55e00" stroke="#ffffff"/>'


def _line(start: int, end: int, y: int) -> str:
    return f'<path d="M{start} {y}H{end}" stroke="#009e73" stroke-width="5"/>'
