"""The figure of `attnlib audit-kv`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.debug.kv_audit import AUDIT_FORMATS, AuditFormat, FormatErrors, KVAudit
from attnlib.spec import AttentionSpec

pytest.importorskip("matplotlib")
FORMATS = (*AUDIT_FORMATS, AuditFormat("dtype of the model", "auto", "one"))
SHOWN = sum("mxfp4" not in one.label for one in FORMATS)
"""Formats besides the unsupported ones."""
SMALL_HEADS = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)


def _drawn(audit: KVAudit, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from matplotlib import pyplot

    from attnlib.bench.kv_audit_figure import draw_audit

    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", lambda figure: None)
        draw_audit(audit, [one.label for one in FORMATS], "an audit", path)
        figure = pyplot.gcf()
    pyplot.close(figure)
    return figure


def _audit(saturated: int) -> KVAudit:
    audit = KVAudit()
    for layer in range(3):
        call = {}
        for place, one in enumerate(FORMATS):
            if "mxfp4" in one.label:
                call[one.label] = FormatErrors(reason="not supported")
                continue
            call[one.label] = FormatErrors(
                bytes_per_token=SMALL_HEADS.replace(**one.spec_fields).kv_bytes_per_token,
                squared_error=1e-4 * place, squared_output=1.0, lse_error=1e-3 * (place + layer),
                max_lse_error=0.1 + place, lse_count=1,
                saturated=saturated if one.scales == "one" else 0, stored=1000,
            )  # fmt: skip
        audit.add(f"layer {layer}", call, SMALL_HEADS)
    return audit


def _values(line: Any) -> list[tuple[float, float]]:
    return list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))


@pytest.mark.parametrize("saturated", [0, 7])
def test_every_value_is_inside_of_its_panel(
    saturated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also formats with scales of small heads, the dtype of the model (100% of the memory) and
    errors of 0."""
    figure = _drawn(_audit(saturated), tmp_path / "audit.svg", monkeypatch)
    output, memory, lse, saturation = figure.axes
    count = SHOWN
    assert [len(panel.lines) for panel in (output, memory, lse)] == [count, count, 2 * count]
    shares = [line.get_xdata()[0] for line in memory.lines]
    assert max(shares) == 100 and 62.5 in [round(share, 1) for share in shares]
    for panel in figure.axes:
        (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
        for x, y in (value for line in panel.lines for value in _values(line)):
            assert left <= x <= right and bottom <= y <= top, panel.get_title()
    drawn = [y for line in lse.lines for _, y in _values(line)]
    # The largest errors, next to the means.
    assert max(drawn) == pytest.approx(0.1 + len(FORMATS) - 1)
    if saturated:
        assert len(saturation.lines) == sum(one.scales == "one" for one in FORMATS)
        assert _values(saturation.lines[0])[0][1] == pytest.approx(0.7)
    else:
        assert not saturation.lines and not saturation.get_visible()


def test_no_two_formats_look_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = _drawn(_audit(0), tmp_path / "audit.png", monkeypatch)
    looks = {
        (line.get_color(), line.get_marker(), line.get_markerfacecolor())
        for line in figure.axes[0].lines
    }
    assert len(looks) == SHOWN
    assert len(figure.legends[0].get_texts()) == SHOWN
