"""The figure of `attnlib audit-kv`: error by layer, and error against memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnlib.bench.figures import COLORS, MARKERS, STYLE
from attnlib.debug.kv_audit import KVAudit

__all__ = ["draw_audit"]


def draw_audit(audit: KVAudit, labels: Sequence[str], title: str, path: str | Path) -> None:
    """Draw an audit.

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

    auto = sum(audit.bytes_per_token.values())
    shown = [label for label in labels if not audit.total(label).reason]
    with matplotlib.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.0, 3.4), width_ratios=(3, 2))
        for place, label in enumerate(shown):
            look = {
                "color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)],
                "markersize": 4,
            }  # fmt: skip
            errors = [formats[label].output_error for formats in audit.layers.values()]
            left.plot(range(len(errors)), errors, label=label, linewidth=1, **look)
            total = audit.total(label)
            right.plot(
                [100 * total.bytes_per_token / auto], [total.output_error], linestyle="", **look
            )
        left.set_yscale("log")
        left.set_xlabel("layer")
        left.set_ylabel("relative RMS error of the output")
        left.xaxis.get_major_locator().set_params(integer=True)
        right.set_yscale("log")
        right.set_xlabel("memory, % of the dtype of the model")
        right.set_xlim(0, 60)
        figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=7.5)
        figure.suptitle(title, fontsize=9)
        figure.tight_layout(rect=(0, 0.12, 1, 1))
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata=metadata)
        pyplot.close(figure)
