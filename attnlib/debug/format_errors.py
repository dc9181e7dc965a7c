"""Sums of the errors that KV formats cause: of one format in one layer, and of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnlib.spec import AttentionSpec

__all__ = ["FormatErrors", "KVAudit"]


@dataclass
class FormatErrors:
    """Sums over calls of the errors of one format in one layer.

    Attributes:
        bytes_per_token: bytes of the keys and values of a token.
        squared_error, squared_output: sums over the elements of outputs.
        max_error, max_output: largest magnitudes of the error and of the output.
        lse_error, max_lse_error: sum and maximum of the magnitudes of LSE errors.
        lse_count: rows that see a key.
        saturated, stored: elements of keys and values that are clipped, and all.
        reason: why the format was not computed; "" if it was.
    """

    bytes_per_token: int = 0
    squared_error: float = 0.0
    squared_output: float = 0.0
    max_error: float = 0.0
    max_output: float = 0.0
    lse_error: float = 0.0
    max_lse_error: float = 0.0
    lse_count: int = 0
    saturated: int = 0
    stored: int = 0
    reason: str = ""

    @property
    def output_error(self) -> float:
        """Root of the mean squared error of the output, relative to that of the output."""
        return (self.squared_error / self.squared_output) ** 0.5 if self.squared_output else 0.0

    @property
    def mean_lse_error(self) -> float:
        """Mean magnitude of the error of the LSE."""
        return self.lse_error / self.lse_count if self.lse_count else 0.0

    @property
    def saturation(self) -> float:
        """Share of the keys and values that are clipped."""
        return self.saturated / self.stored if self.stored else 0.0

    def add(self, other: FormatErrors) -> None:
        """Add the errors of further calls."""
        for name in (
            "squared_error",
            "squared_output",
            "lse_error",
            "lse_count",
            "saturated",
            "stored",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("max_error", "max_output", "max_lse_error"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.bytes_per_token = other.bytes_per_token
        self.reason = self.reason or other.reason


@dataclass
class KVAudit:
    """The errors of formats, by layer.

    Attributes:
        layers: layer name -> format label -> errors.
        bytes_per_token: layer name -> bytes of a token in 16 bits.
    """

    layers: dict[str, dict[str, FormatErrors]] = field(default_factory=dict)
    bytes_per_token: dict[str, int] = field(default_factory=dict)

    def add(self, layer: str, call: dict[str, FormatErrors], spec: AttentionSpec) -> None:
        """Add the errors of one call of a layer."""
        known = self.layers.setdefault(layer, {})
        for label, errors in call.items():
            known.setdefault(label, FormatErrors()).add(errors)
        self.bytes_per_token[layer] = spec.replace(kv_cache_dtype="bfloat16").kv_bytes_per_token

    def total(self, label: str) -> FormatErrors:
        """The errors of a format over all layers; `bytes_per_token` is that of the model."""
        total, num_bytes = FormatErrors(), 0
        for formats in self.layers.values():
            total.add(formats[label])
            num_bytes += formats[label].bytes_per_token
        total.bytes_per_token = num_bytes
        return total

    def output_error(self, label: str) -> float:
        """The root mean square over layers of the relative error of the output: every layer counts
        alike, however large its outputs are. The divergence of a model follows its square."""
        errors = [formats[label].output_error for formats in self.layers.values()]
        return float((sum(x * x for x in errors) / max(1, len(errors))) ** 0.5)

    def totals(self) -> dict[str, Any]:
        """Each format over all layers, as plain values for JSON."""
        labels = dict.fromkeys(label for formats in self.layers.values() for label in formats)
        found: dict[str, Any] = {}
        for label in labels:
            total = self.total(label)
            found[label] = (
                {"unsupported": total.reason}
                if total.reason
                else {
                    "output_error": self.output_error(label),
                    "pooled_output_error": total.output_error,
                    "mean_lse_error": total.mean_lse_error,
                    "bytes_per_token": total.bytes_per_token,
                    "memory_saved": 1 - total.bytes_per_token / sum(self.bytes_per_token.values()),
                }
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            layer: {
                label: {
                    "output_error": errors.output_error,
                    "max_output_error": errors.max_error,
                    "max_output": errors.max_output,
                    "mean_lse_error": errors.mean_lse_error,
                    "max_lse_error": errors.max_lse_error,
                    "saturation": errors.saturation,
                    "bytes_per_token": errors.bytes_per_token,
                    "memory_saved": 1 - errors.bytes_per_token / self.bytes_per_token[layer],
                }
                if not errors.reason
                else {"unsupported": errors.reason}
                for label, errors in formats.items()
            }
            for layer, formats in self.layers.items()
        }
