"""The arguments of `run`, and the checks of those that no layer sees."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib.compat.flashinfer.arguments import check_tensors, integer, number
from attnlib.compat.flashinfer.page import PagedCache
from attnlib.compat.flashinfer.plan import Plan
from attnlib.errors import ContractError

__all__ = ["RunArguments"]


class RunArguments(NamedTuple):
    """The arguments of `run`.

    Attributes:
        q: `[T, Hq, D]`.
        paged_kv_cache: the cache.
        q_scale, k_scale, v_scale, out, lse, return_lse, window_left: as in `run`.
        query_len: queries of each request, if all have the same.
    """

    q: torch.Tensor
    paged_kv_cache: PagedCache
    q_scale: float | None = None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = False
    window_left: int | None = None
    query_len: int | None = None

    def check(self, plan: Plan) -> None:
        """Raises:
        ContractError: a tensor or scale does not fit the plan.
        ValueError: another window than the plan's.
        """
        check_tensors(q=self.q)
        if self.q.dim() < 2:
            raise ContractError(
                f"q has shape {tuple(self.q.shape)}; it must be [tokens, heads, head_dim]"
            )
        left = plan.form.window_left
        if self.window_left is not None and integer("window_left", self.window_left, -1) != left:
            raise ValueError(
                f"window_left={self.window_left} differs from window_left={left} of plan"
            )
        self._check_lse(plan)
        for name, value in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if value is not None and not isinstance(value, torch.Tensor):
                number(name, value)
            elif value is not None and not plan.spec.is_kv_quantized and value.numel() != 1:
                raise ContractError(
                    f"{name} has shape {tuple(value.shape)}, but the cache is not quantized: give "
                    "one number",
                    rule="M9",
                )

    def _check_lse(self, plan: Plan) -> None:
        lse, heads = self.lse, (self.q.shape[0], plan.spec.num_heads)
        if lse is None:
            return
        check_tensors(lse=lse)
        fits = lse.shape == heads and lse.dtype == torch.float32 and lse.device == self.q.device
        if self.return_lse and not fits:
            raise ContractError(
                f"lse is {lse.dtype} {tuple(lse.shape)} on {lse.device}; it must be torch.float32 "
                f"{list(heads)} on {self.q.device}",
                rule="M5",
            )
