"""What a KV format does to a model: perplexity, divergence and agreement, through `PagedModel`.

The tokens of a prompt are one prefill, so that every query reads keys and values from the cache.
The distributions of every fourth position are compared with those over a cache in the dtype of the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.debug.kv_audit import AuditFormat
from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.metadata.common import CommonAttentionMetadata

__all__ = [
    "Quality",
    "Reference",
    "mean_quality",
    "measure_quality",
    "paged_model",
    "prefill",
    "reference_of",
]

_BLOCK_SIZE = 16
_STEP = 4
_ROWS = 128
"""Distributions compared at a time."""


@dataclass(frozen=True)
class Quality:
    """A format on one prompt, or on several.

    Attributes:
        perplexity: exponential of the mean negative log-likelihood of the next tokens.
        kl: mean divergence of the distributions from those of the reference, in nats.
        top1: share of the positions with the same most likely token.
        positions: compared positions.
    """

    perplexity: float
    kl: float
    top1: float
    positions: int


@dataclass(frozen=True)
class Reference:
    """A prompt over a cache in the dtype of the model.

    Attributes:
        tokens: token ids.
        log_probs: `[positions, vocabulary]` float32.
        targets: `[positions]`, the tokens that follow.
        largest: layer name -> largest magnitudes of its keys and of its values.
    """

    tokens: Sequence[int]
    log_probs: torch.Tensor
    targets: torch.Tensor
    largest: Mapping[str, tuple[float, float]]

    @property
    def quality(self) -> Quality:
        """That of the reference itself."""
        perplexity = float(_likelihood(self.log_probs, self.targets).neg().mean().exp())
        return Quality(perplexity, 0.0, 1.0, len(self.targets))


def reference_of(model: Any, tokens: Sequence[int], backend: str | None = None) -> Reference:
    """Run a prompt over a cache in the dtype of the model.

    Args:
        model: of transformers.
        tokens: at least two.
        backend: of the attention, as in `PagedModel`.
    """
    largest: dict[str, tuple[float, float]] = {}

    def observe(layer: Any, query: Any, key: Any, value: Any, *rest: Any) -> None:
        if key is not None:
            largest[layer.prefix] = float(key.abs().max()), float(value.abs().max())

    OBSERVERS.append(observe)
    try:
        log_probs = _log_probs(paged_model(model, tokens, backend), tokens)
    finally:
        OBSERVERS.remove(observe)
    targets = torch.tensor(tokens[1::_STEP][: len(log_probs)], device=log_probs.device)
    return Reference(tokens, log_probs, targets, largest)


def measure_quality(
    model: Any, one: AuditFormat, reference: Reference, backend: str | None = None
) -> Quality:
    """A format on the prompt of a reference.

    Raises:
        ContractError: no layer of the model can have this format.
        UnsupportedConfigError: the backend does not support it.
    """
    paged = paged_model(model, reference.tokens, backend, **one.spec_fields)
    if one.scales != "page":
        _set_scales(paged, one, reference)
    new = _log_probs(paged, reference.tokens)
    kl, same = 0.0, 0
    for first in range(0, len(new), _ROWS):
        old, rows = reference.log_probs[first : first + _ROWS], new[first : first + _ROWS]
        kl += float((old.exp() * (old - rows)).sum())
        same += int((old.argmax(-1) == rows.argmax(-1)).sum())
    perplexity = float(_likelihood(new, reference.targets).neg().mean().exp())
    return Quality(perplexity, kl / len(new), same / len(new), len(new))


def mean_quality(found: Iterable[Quality]) -> Quality:
    """The means over prompts; the perplexity is the geometric mean."""
    rows = list(found)
    weights = torch.tensor([row.positions for row in rows], dtype=torch.float64)
    weights /= weights.sum()

    def mean(values: Callable[[Quality], float]) -> float:
        return float((weights * torch.tensor([values(row) for row in rows])).sum())

    logs = torch.tensor([row.perplexity for row in rows], dtype=torch.float64).log()
    perplexity = float((weights * logs).sum().exp())
    positions = sum(row.positions for row in rows)
    return Quality(perplexity, mean(lambda x: x.kl), mean(lambda x: x.top1), positions)


def paged_model(
    model: Any, tokens: Sequence[int], backend: str | None, **stored: Any
) -> PagedModel:
    """The model over caches for one prompt.

    Args:
        model: of transformers.
        tokens: of the prompt.
        backend: of the attention, as in `PagedModel`.
        stored: fields of a spec that say how the caches store heads.
    """
    blocks = -(-len(tokens) // _BLOCK_SIZE)
    more = {"block_size": _BLOCK_SIZE, "backend": backend, "latents": False, **stored}
    return PagedModel(model, num_blocks=blocks, num_slots=1, **more)


def prefill(paged: PagedModel, tokens: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """The logits `[n, vocabulary]` of some tokens of a prompt.

    Args:
        paged: of `paged_model`.
        tokens: of the prompt.
        rows: `[n]` int64, the positions.
    """
    device, count = next(paged.model.parameters()).device, len(tokens)
    table = [list(range(paged.num_blocks))]
    common = CommonAttentionMetadata.from_lengths(
        [count], [count], table, _BLOCK_SIZE, device, state_slots=[0]
    )
    ids, positions = torch.tensor(tokens, device=device), torch.arange(count, device=device)
    with paged.attached():
        return paged.step(ids, positions, common, rows=rows)


def _log_probs(paged: PagedModel, tokens: Sequence[int]) -> torch.Tensor:
    """The log-probabilities of the next token at every fourth position, the last one left out."""
    rows = torch.arange(0, len(tokens) - 1, _STEP)
    return prefill(paged, tokens, rows).float().log_softmax(-1)


def _set_scales(paged: PagedModel, one: AuditFormat, reference: Reference) -> None:
    """Give the caches the scales of a format outside of the page: 1, or those of the reference."""
    tokens = reference.tokens[:_BLOCK_SIZE]
    if one.scales == "one":
        return
    _log_probs(paged, tokens)  # creates the layers; its keys are written again
    for layer, cache in paged.layers():
        limit = torch.finfo(cache.dtype).max
        for name, largest in zip(
            ("k_scale", "v_scale"), reference.largest[layer.prefix], strict=True
        ):
            setattr(cache, name, max(largest / limit, 2.0**-100))


def _likelihood(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return log_probs.gather(1, targets[:, None])[:, 0]
