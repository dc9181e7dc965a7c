"""Masks that depend on the batch: each is a spec of its own over the cache of the layer.

vLLM says for each batch whether it is causal, where its images are, and how long its prompts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.score_functions.builtin import bidirectional_spans, retained_window, span_tensors
from attnlib.spec import AttentionSpec, AttentionType, MaskKind, Window

__all__ = ["BatchTensors", "Mask", "announced_masks", "image_spans", "mask_of", "masked_spec"]


class Mask(Enum):
    """The mask of a batch."""

    OWN = "own"
    """That of the layer."""
    FULL = "full"
    """Every key of the request: drafts that see each other."""
    PER_REQUEST = "per request"
    """`OWN` for some requests and `FULL` for the others, in one batch."""
    SPANS = "image spans"
    """The tokens of an image see each other."""
    RETAINED = "retained window"
    """Prompts are visible to all queries, other keys in a window (R-SWA)."""


def announced_masks(vllm_config: Any) -> tuple[Mask, ...]:
    """The masks that batches of an engine may have besides that of the layers."""
    model, found = vllm_config.model_config, []
    if getattr(model, "is_mm_prefix_lm", False):
        found.append(Mask.SPANS)
    if getattr(model, "rswa_window", None) is not None:
        found.append(Mask.RETAINED)
    if getattr(getattr(vllm_config, "attention_config", None), "use_non_causal", False):
        found += [Mask.FULL, Mask.PER_REQUEST]
    return tuple(found)


def mask_of(batch: Any, attn_type: AttentionType, announced: Sequence[Mask]) -> tuple[Mask, Any]:
    """The mask of one of vLLM's batches, and its image spans.

    Raises:
        UnsupportedConfigError: encoders or cross-attention with a causal mask.
    """
    if attn_type is not AttentionType.DECODER:
        if batch.causal is not False:
            raise UnsupportedConfigError(
                f"a batch of layers with attn_type={attn_type.value} has causal={batch.causal}: "
                "such layers see all keys; use another attention backend"
            )
        return Mask.OWN, None
    if isinstance(batch.causal, torch.Tensor):
        return Mask.PER_REQUEST, None
    if not batch.causal:
        return Mask.FULL, None
    if Mask.RETAINED in announced and batch.rswa_prefix_lens is not None:
        return Mask.RETAINED, None
    spans = image_spans(batch) if Mask.SPANS in announced else None
    return (Mask.OWN if spans is None else Mask.SPANS), spans


def masked_spec(
    spec: AttentionSpec, mask: Mask, *, clamped: bool = False, retained: int = 0
) -> AttentionSpec:
    """The spec of a layer under a mask.

    Args:
        spec: of the layer.
        mask: of the batch.
        clamped: images are visible within the window of the layer only (Gemma 4).
        retained: the window of `Mask.RETAINED`, in tokens.

    Raises:
        UnsupportedConfigError: the layer has a score function, and the mask needs one.
    """
    if mask is Mask.OWN or spec.attn_type is not AttentionType.DECODER:
        return spec
    if mask is Mask.FULL:
        return spec.replace(mask_kind=MaskKind.BIDIRECTIONAL)
    if mask is Mask.PER_REQUEST:
        return spec.replace(mask_kind=MaskKind.PER_REQUEST)
    if spec.score_function is not None:
        raise UnsupportedConfigError(
            f"layers with ALiBi by the root of the distance have no batches with {mask.value}: use "
            "another attention backend for this model"
        )
    if mask is Mask.RETAINED:
        return spec.replace(sliding_window=None, score_function=retained_window(retained))
    window = spec.sliding_window
    kept = Window(window - 1, None) if clamped and window is not None else None
    return spec.replace(
        sliding_window=None,
        window=kept,
        mask_kind=MaskKind.BIDIRECTIONAL,
        score_function=bidirectional_spans(None if clamped else window),
    )


def image_spans(batch: Any) -> list[list[tuple[int, int]]] | None:
    """For each request the images that its new tokens touch, as (first position, position after the
    last); None if there are none, as in decodes and batches of text."""
    ranges = batch.mm_req_doc_ranges
    if not ranges or not any(ranges.values()):
        return None
    starts, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu_upper_bound
    found: list[list[tuple[int, int]]] = []
    for request in range(batch.num_reqs):
        new, length = starts[request + 1] - starts[request], int(lengths[request])
        images = ranges.get(request, ()) if new else ()
        found.append([(a, b + 1) for a, b in images if a < length and b >= length - new])
    return found if any(found) else None


class BatchTensors:
    """What masks need on the device, in the same memory for every batch, so that graphs read the
    values of the batch that replays them.

    Args:
        num_reqs: requests of the largest batch.
        device: where the layers run.
    """

    def __init__(self, num_reqs: int, device: torch.device) -> None:
        self._flags = torch.ones(num_reqs, dtype=torch.bool, device=device)
        self._lens = torch.zeros(num_reqs, 1, dtype=torch.int32, device=device)

    def causal(self, batch: Any) -> torch.Tensor | None:
        """Whether each request is causal, `[R]`; None where a batch has one mask."""
        if not isinstance(batch.causal, torch.Tensor):
            return None
        return self._flags[: batch.num_reqs].copy_(batch.causal[: batch.num_reqs] != 0)

    def score_tensors(
        self, mask: Mask, batch: Any, spans: Any, spec: AttentionSpec
    ) -> dict[str, torch.Tensor] | None:
        """The batch tensors of the score function of a mask."""
        if mask is Mask.RETAINED:
            lens = batch.rswa_prefix_lens
            if not isinstance(lens, torch.Tensor):
                lens = torch.tensor(lens, device="cpu")
            lens = lens[: batch.num_reqs]
            self._lens[: batch.num_reqs].zero_()
            self._lens[: lens.shape[0], 0].copy_(lens, non_blocking=True)
            return {"prefix_len": self._lens[: batch.num_reqs]}
        if mask is not Mask.SPANS or spec.score_function is None:
            return None
        # Batches with images are prefills, which no graph contains.
        made = span_tensors(spans, max(end for row in spans for _, end in row))
        names, device = spec.score_function.batch_tensors, self._lens.device
        return {name: made[name].to(device, non_blocking=True) for name in names}
