"""Draw the gallery of score functions, `docs/guides/score-functions.png`.

    python docs/score_gallery.py

Each panel evaluates a function of `attnlib.score_functions.builtin` on scores of 0, with the mask
of its layer. White keys are hidden; colors show what the function adds to a score.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from attnlib.score_functions import ScoreFunction, builtin

LENGTH = 32
TARGET = Path(__file__).parent / "guides" / "score-functions.png"


def panels() -> list[tuple[str, ScoreFunction, dict[str, torch.Tensor], int]]:
    """(title, function, tensors, query head) of each panel."""
    column = torch.tensor([[12]], dtype=torch.int32)
    spans = builtin.span_tensors([[(4, 10), (16, 24)]], LENGTH)
    packed = builtin.document_tensors([[10, 6, 16]], LENGTH)
    items = torch.zeros(1, LENGTH, dtype=torch.int32)
    for begin in range(12, LENGTH, 7):
        items[0, begin : begin + 7] = begin
    window = {"window": torch.tensor([4, 12], dtype=torch.int32)}
    slope = {"slope": torch.tensor([0.5])}
    bias = builtin.t5_relative_bias(
        torch.linspace(0.0, -3.0, 32)[:, None], bidirectional=False, max_distance=32
    )
    return [
        ("prefix_lm: prompt of 12", builtin.prefix_lm(), {"prefix_len": column}, 0),
        ("bidirectional_spans", builtin.bidirectional_spans(), spans, 0),
        ("bidirectional_spans(window=6)", builtin.bidirectional_spans(6), spans, 0),
        ("documents: 10, 6, 16", builtin.documents(), packed, 0),
        ("documents(causal=False)", builtin.documents(causal=False), packed, 0),
        (
            "multi_item: prompt of 12",
            builtin.multi_item(),
            {"prefix_len": column, "item_begin": items},
            0,
        ),
        ("block_diffusion(8)", builtin.block_diffusion(8), {}, 0),
        ("head_windows: head 0, window 4", builtin.head_windows(), window, 0),
        ("head_windows: head 1, window 12", builtin.head_windows(), window, 1),
        ("relative_bias: T5 buckets", builtin.relative_bias(32), {"bias": bias}, 0),
        ("alibi_sqrt: slope 0.5", builtin.alibi_sqrt(), slope, 0),
    ]


def added(
    title: str, function: ScoreFunction, tensors: dict[str, torch.Tensor], head: int
) -> torch.Tensor:
    """`[L, L]`: what the function adds to the scores, -inf where a key is hidden."""
    positions = torch.arange(LENGTH)
    heads = torch.tensor([[[head]]])
    scores = torch.zeros(1, LENGTH, LENGTH)
    found = function.evaluate(scores, positions[:, None], positions, heads, 0, tensors)[0]
    if function.needs_bidirectional or "causal=False" in title:
        return found
    return found.masked_fill(positions > positions[:, None], -math.inf)


def main() -> None:
    figure, axes = plt.subplots(3, 4, figsize=(11, 8.6), layout="constrained")
    colors: Any = plt.get_cmap("viridis").copy()
    colors.set_bad("white")
    for axis, panel in zip(axes.flat, panels(), strict=False):
        values = added(*panel)
        shown = values.masked_fill(values == -math.inf, math.nan)
        image = axis.imshow(shown, cmap=colors, vmin=min(-1.0, float(shown.nan_to_num().min())))
        axis.set_title(panel[0], fontsize=9)
        axis.set_xlabel("key", fontsize=8)
        axis.set_ylabel("query", fontsize=8)
        axis.tick_params(labelsize=7)
        if float(shown.nan_to_num().min()) < 0:
            figure.colorbar(image, ax=axis, shrink=0.7).ax.tick_params(labelsize=7)
    for axis in axes.flat[len(panels()) :]:
        axis.axis("off")
    figure.savefig(TARGET, dpi=90, metadata={"Software": None})
    print(f"wrote {TARGET.relative_to(TARGET.parents[2])}")


if __name__ == "__main__":
    main()
