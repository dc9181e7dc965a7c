"""Comparison of the served tokens and logits with the model's own eager attention.

The reference computes the prompt and the generated tokens in one forward pass. If its best token at
each position equals the generated one, greedy decoding with the reference gives the same tokens.

Below float32 eager attention rounds too. A token may then differ if the reference prefers its own
token by less than the error that the dtype allows, measured on the logits of the reference alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from attnlib.cli.demo.scheduler import Request

__all__ = ["LOGIT_BUDGET", "DemoResult", "check_tokens", "compare"]

LOGIT_BUDGET = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Allowed error of a logit for each dtype, relative to the largest logit of its row. It covers some
tens of roundings through the layers."""


@dataclass(frozen=True)
class DemoResult:
    """The result of the comparison.

    Attributes:
        tokens: number of tokens compared.
        identical: number of tokens that are the reference's choice too.
        largest_error: largest error of a logit relative to the largest logit of its row; inf if a
            logit is not finite.
        budget: the allowed error.
        first_difference: description of the first token that differs, "" if all are identical.
        near_ties: number of tokens that differ where the reference prefers its own by less than the
            budget; always 0 in float32.
        identical_by_request: request index -> number of its tokens that are identical.
    """

    tokens: int
    identical: int
    largest_error: float
    budget: float
    first_difference: str
    near_ties: int
    identical_by_request: dict[int, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if there are tokens, errors are within the budget, and all tokens are identical or
        near ties.
        """
        return (
            self.tokens > 0
            and self.largest_error <= self.budget
            and self.identical + self.near_ties == self.tokens
        )

    def __str__(self) -> str:
        tokens = f"{self.identical}/{self.tokens} tokens identical to eager attention"
        error = f"largest logit error {self.largest_error:.1e} of the row maximum"
        parts = [tokens, f"{error} (allowed {self.budget:.0e})"]
        if self.near_ties:
            parts.append(
                f"{self.near_ties} tokens differ where eager attention prefers its own token by "
                "less"
            )
        if self.first_difference:
            parts.append(f"first difference: {self.first_difference}")
        return f"{'PASSED' if self.passed else 'FAILED'}: {'; '.join(parts)}"


def check_tokens(
    model: Any, requests: list[Request], logits: dict[int, list[torch.Tensor]]
) -> DemoResult:
    """Compare every generated token and its logits with the model's eager attention.

    Args:
        model: the model.
        requests: the finished requests with their tokens.
        logits: request index -> logits of each generated token, from `ServingResult`.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        pairs = [
            (request, _reference(model, request), torch.stack(logits[request.index]))
            for request in requests
        ]
    finally:
        model.set_attn_implementation(before)
    return compare(pairs, next(model.parameters()).dtype)


def compare(
    pairs: list[tuple[Request, torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> DemoResult:
    """Compare logits and tokens.

    Args:
        pairs: (request, logits of the reference, served logits); logits are `[generated tokens,
            vocabulary]` float32.
        dtype: the dtype of the model.
    """
    budget = LOGIT_BUDGET.get(dtype, LOGIT_BUDGET[torch.float32])
    near_ties = 0
    equal: dict[int, int] = {}
    largest_error, first_difference = 0.0, ""
    for request, reference, served in pairs:
        errors, scales = (reference - served).abs().amax(-1), reference.abs().amax(-1)
        relative = torch.where(errors == 0, 0.0, errors / scales)
        relative = relative.nan_to_num(nan=torch.inf)  # comparisons with NaN are always False
        largest_error = max(largest_error, float(relative.max()))
        equal[request.index] = 0
        for position, (row, token) in enumerate(zip(reference, request.generated, strict=True)):
            best = int(row.argmax())
            if best == token:
                equal[request.index] += 1
                continue
            margin, scale = float(row[best] - row[token]), float(scales[position])
            near_ties += dtype is not torch.float32 and margin <= budget * scale
            first_difference = first_difference or (
                f"request {request.index}, token {position}: {token} instead of {best}, which "
                f"eager attention prefers by {margin:.1e} ({margin / scale:.1e} of the row maximum)"
            )
    tokens = sum(len(request.generated) for request, _, _ in pairs)
    return DemoResult(
        tokens,
        sum(equal.values()),
        largest_error,
        budget,
        first_difference,
        near_ties,
        equal,
    )


@torch.no_grad()
def _reference(model: Any, request: Request) -> torch.Tensor:
    """Eager logits of each generated token, `[generated tokens, vocabulary]` float32 on the CPU."""
    ids = torch.tensor([request.tokens[:-1]], device=next(model.parameters()).device)
    logits: torch.Tensor = (
        model(ids, use_cache=False).logits[0, len(request.prompt) - 1 :].float().cpu()
    )
    return logits
