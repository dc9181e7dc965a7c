"""The tables of `attnlib audit-kv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnlib.cli.kv_quality import Quality
    from attnlib.debug.format_errors import FormatErrors, KVAudit

__all__ = ["DTYPE_OF_THE_MODEL", "audit_table", "quality_table", "rank_correlation"]

DTYPE_OF_THE_MODEL = "dtype of the model"
"""The row with which formats are compared."""

_MEMORY = f"{'bytes/token':>11} {'saved':>6}"
_HEADER = f"{'LSE':>9} {'max':>9} {'saturated':>10}"


def _columns(errors: FormatErrors) -> str:
    """The columns of `_HEADER`."""
    return f"{errors.mean_lse_error:>9.2e} {errors.max_lse_error:>9.2e} {errors.saturation:>10.2%}"


def audit_table(audit: KVAudit, labels: Sequence[str], source: str, all_layers: bool) -> str:
    """Memory, errors and saturation of each format, and those of each layer.

    Args:
        audit: the errors.
        labels: the formats.
        source: what was audited.
        all_layers: whether to list the layers.
    """
    wide = max(map(len, ("format", *labels)))
    lines = [
        f"KV formats on {source}",
        "output: relative error, root mean square over layers; LSE: mean and largest error;",
        "saved: memory, compared with 16 bits",
        "",
        f"{'format':{wide}} {_MEMORY} {'output':>9} {'worst layer':>20} {_HEADER}",
    ]
    auto = sum(audit.bytes_per_token.values())
    for label in labels:
        total = audit.total(label)
        if total.reason:
            lines.append(f"{label:{wide}} {total.reason}")
            continue
        worst = max(audit.layers, key=lambda name: audit.layers[name][label].output_error)
        error = audit.layers[worst][label].output_error
        lines.append(
            f"{label:{wide}} {total.bytes_per_token:>11} {1 - total.bytes_per_token / auto:>6.0%} "
            f"{audit.output_error(label):>9.2e} {f'{worst} {error:.2e}':>20} {_columns(total)}"
        )
    if all_layers:
        width = max(map(len, ("layer", *audit.layers)))
        lines += ["", f"{'layer':{width}} {'format':{wide}} {_MEMORY} {'output':>9} {_HEADER}"]
        for name, found in audit.layers.items():
            for label, errors in found.items():
                if errors.reason:
                    lines.append(f"{name:{width}} {label:{wide}} {errors.reason}")
                    continue
                saved = 1 - errors.bytes_per_token / audit.bytes_per_token[name]
                lines.append(
                    f"{name:{width}} {label:{wide}} {errors.bytes_per_token:>11} {saved:>6.0%} "
                    f"{errors.output_error:>9.2e} {_columns(errors)}"
                )
    return "\n".join(lines)


def quality_table(quality: Mapping[str, Mapping[str, Quality]], audit: KVAudit) -> str:
    """Bits of an element with its scales, perplexity on each text, divergence and agreement; and
    whether the audit ranks the formats as the divergence does.

    Args:
        quality: label -> text -> quality; the first label is the reference.
        audit: the errors of the other labels.
    """
    from attnlib.cli.kv_quality import mean_quality

    texts = list(next(iter(quality.values())))
    wide = max(map(len, ("format", *quality)))
    heads = " ".join(f"{text:>{max(10, len(text))}}" for text in texts)
    lines = [
        "perplexity on each text; KL: mean divergence from the first row in nats; same: positions",
        "with the same most likely token",
        "",
        f"{'format':{wide}} {'bits':>5} {heads} {'KL':>8} {'same':>6}",
    ]
    elements, pairs = sum(audit.bytes_per_token.values()) / 2, []  # bytes of 16 bits
    for label, row in quality.items():
        found = mean_quality(row.values())
        each = " ".join(f"{row[text].perplexity:>{max(10, len(text))}.2f}" for text in texts)
        bits = ""
        if label != DTYPE_OF_THE_MODEL:
            bits = f"{8 * audit.total(label).bytes_per_token / elements:.2f}"
            pairs.append((audit.output_error(label), found.kl))
        lines.append(f"{label:{wide}} {bits:>5} {each} {found.kl:>8.5f} {found.top1:>6.1%}")
    if len(pairs) > 2:
        correlation = rank_correlation(pairs)
        lines += ["", f"rank correlation of the output's error and KL: {correlation:.3f}"]
    return "\n".join(lines)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's coefficient of at least two pairs: 1 where both numbers rank them equally."""
    count = len(pairs)
    orders = [sorted(range(count), key=lambda n: pairs[n][side]) for side in (0, 1)]
    ranks = [{place: rank for rank, place in enumerate(order)} for order in orders]
    squares = sum((ranks[0][n] - ranks[1][n]) ** 2 for n in range(count))
    return 1 - 6 * squares / (count * (count**2 - 1))
