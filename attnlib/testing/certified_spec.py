"""What a certificate says about one kind of layer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

__all__ = ["CertifiedSpec", "hash_of"]


@dataclass(frozen=True)
class CertifiedSpec:
    """The comparisons of one kind of layer.

    Attributes:
        name: of the kind of layer.
        case: sizes and features.
        explanation: what the backend says about its kernels.
        kernels: names of the GPU kernels that ran, in alphabetical order; empty on a CPU.
        batch: the requests, in the notation of `batch_spec`.
        unsupported: why the backend does not support the layer; empty if it does.
        not_run: why nothing was compared, although it may be supported; "" if it was.
        compared: rows compared for each of `KINDS`, or of `STATE_KINDS` for a state layer (T18).
        sha256: hash of the results of the requests alone.
        different: batches with other bits, likewise.
        failures: the first of them.
    """

    name: str
    case: str
    explanation: tuple[str, ...]
    batch: str
    kernels: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    compared: dict[str, int] | None = None
    sha256: str = ""
    different: dict[str, int] | None = None
    failures: tuple[str, ...] = ()
    not_run: str = ""

    def __str__(self) -> str:
        """One line, and the first failures."""
        if self.not_run:
            return f"{self.name}: not run: {self.not_run}"
        if self.unsupported:
            return f"{self.name}: unsupported: {'; '.join(self.unsupported)}"
        rows, batches = (sum((n or {}).values()) for n in (self.compared, self.different))
        line = (
            f"{self.name}: {rows} rows compared, {batches} batches with other bits, "
            f"sha256 {self.sha256[:16]}"
        )
        return "\n  ".join([line, *self.failures])


def hash_of(results: Iterable[torch.Tensor | None]) -> str:
    """SHA-256 of the bits of results; None is left out."""
    digest = hashlib.sha256()
    for tensor in results:
        if tensor is not None:
            digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
