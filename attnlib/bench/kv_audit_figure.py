"""The figure of `attnlib audit-kv`: errors and saturation by layer, and error against memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlib.bench.plots import COLORS, MARKERS, STYLE
from attnlib.debug.kv_audit import KVAudit

__all__ = ["draw_audit"]

_LEGEND_COLUMNS = 4
_ROW_INCHES = 0.19
"""Height of a row of the legend."""
_PANELS_INCHES = 5.4
_LEAST = 1e-8
"""Errors below it are drawn here: 0 has no place on a logarithmic axis."""


def draw_audit(audit: KVAudit, labels: Sequence[str], title: str, path: str | Path) -> None:
    """Draw an audit in three or four panels.

    By layer: the error of the output and of the LSE (mean as lines, largest as dots), and the share
    of saturated elements, where some saturate. Over all layers: the error of the output against
    memory.

    Args:
        audit: the errors of at least one layer.
        labels: the formats to draw; those without results are left out.
        title: what was audited.
        path: an SVG or PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [label for label in labels if not audit.total(label).reason]
    legend_inches = _ROW_INCHES * (0.5 - len(shown) // -_LEGEND_COLUMNS)
    height = _PANELS_INCHES + legend_inches
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(2, 2, figsize=(8.0, height), width_ratios=(3, 2))
        _draw_panels(audit, shown, axes)
        figure.legend(
            *axes[0][0].get_legend_handles_labels(),
            loc="lower center",
            ncols=_LEGEND_COLUMNS,
            fontsize=8,
            frameon=False,
        )
        figure.suptitle(title, fontsize=9)
        figure.tight_layout(rect=(0, legend_inches / height, 1, 1))
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata=metadata)
        pyplot.close(figure)


def _draw_panels(audit: KVAudit, shown: Sequence[str], axes: Any) -> None:
    (output, memory), (lse, saturation) = axes
    auto = sum(audit.bytes_per_token.values())
    layers = range(len(audit.layers))
    largest_memory, saturates = 0.0, False
    for place, label in enumerate(shown):
        look = _look(place)
        errors = [formats[label] for formats in audit.layers.values()]
        total = audit.total(label)
        dots = {**look, "linestyle": "", "markersize": 2.5}
        output.plot(layers, [max(_LEAST, e.output_error) for e in errors], label=label, **look)
        lse.plot(layers, [max(_LEAST, e.mean_lse_error) for e in errors], **look)
        lse.plot(layers, [max(_LEAST, e.max_lse_error) for e in errors], **dots)
        if total.saturated:
            saturates = True
            saturation.plot(layers, [100 * e.saturation for e in errors], **look)
        share = 100 * total.bytes_per_token / auto
        largest_memory = max(largest_memory, share)
        error = max(_LEAST, audit.output_error(label))
        memory.plot([share], [error], **{**dots, "markersize": 6})
    for panel, name in ((output, "output"), (lse, "LSE")):
        panel.set_yscale("log")
        panel.set_title(f"error of the {name}")
    output.set_ylabel("relative RMS error")
    lse.set_ylabel("mean (lines) and largest (dots)")
    saturation.set_visible(saturates)
    saturation.set_title("saturated keys and values")
    saturation.set_ylabel("% of the elements")
    saturation.set_yscale("symlog", linthresh=1e-3)
    saturation.set_ylim(bottom=0)  # formats that never saturate are not drawn
    for panel in (output, lse, saturation):
        panel.set_xlabel("layer")
        panel.xaxis.get_major_locator().set_params(integer=True)
    memory.set_yscale("log")
    memory.set_title("error of the output against memory")
    memory.set_xlabel("memory, % of 16 bits")
    memory.set_xlim(0, 1.08 * largest_memory)


def _look(place: int) -> dict[str, Any]:
    """Color, marker and line of a format; dashes and open markers where colors repeat."""
    color, is_second = COLORS[place % len(COLORS)], place // len(COLORS) % 2 == 1
    return {
        "color": color,
        "marker": MARKERS[(place + place // len(COLORS)) % len(MARKERS)],
        "markerfacecolor": "white" if is_second else color,
        "markersize": 4,
        "linewidth": 1,
        "linestyle": "--" if is_second else "-",
    }
