"""The experts of a model in the steps of a `PagedModel`.

On a GPU, transformers computes experts as grouped products (`grouped_mm`), and its `generate` turns
to `batched_mm`, which copies the weights of the chosen experts and launches half as many kernels,
for all decodes. The steps of an engine have any number of tokens, so each call chooses by its size.
On an H200, copies are faster up to 127 to 192 MiB where Python launches the kernels, and up to 32
to 48 MiB in a CUDA graph (`benchmarks/results/notes/kernel_experiments.txt`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from attnlib.integrations.transformers import devices
from attnlib.integrations.transformers.paged_calls import LOCAL

__all__ = ["compute_experts", "sized_experts"]

NAME = "attnlib"
_GROUPED, _BATCHED = "grouped_mm", "batched_mm"
COPIED_BYTES = 192 * 2**20
COPIED_IN_GRAPH = 48 * 2**20
"""The most bytes of weights that a call copies, and one in a CUDA graph."""


@contextmanager
def sized_experts(model: nn.Module) -> Iterator[None]:
    """Context in which each call of grouped experts on a GPU chooses between the two ways, by the
    name that `registration` registers.

    Quantized models have other functions, and keep them.
    """
    held: Any = model
    given: dict[str, str | None] = held.get_experts_implementation()
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    if devices.kind_of(held.device) == "cpu" or is_quantized or _GROUPED not in given.values():
        yield
        return
    held.set_experts_implementation({k: NAME if v == _GROUPED else v for k, v in given.items()})
    try:
        yield
    finally:
        held.set_experts_implementation(given)


def compute_experts(
    module: nn.Module, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The output of a module of experts.

    Args:
        module: with the weights of all experts.
        hidden: `[T, hidden size]`.
        experts, weights: `[T, k]`, the chosen experts of each token, and their weights.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    held: Any = module
    first = held.gate_up_proj if held.has_gate else held.up_proj
    copied = experts.numel() * (first.nbytes // first.shape[0])
    # The host loops over grouped products of other dtypes, which a graph cannot contain.
    in_graph = getattr(LOCAL, "in_graph", False) and first.dtype == torch.bfloat16
    most = COPIED_IN_GRAPH if in_graph else COPIED_BYTES
    name = _BATCHED if copied <= most else _GROUPED
    found: torch.Tensor = ALL_EXPERTS_FUNCTIONS[name](module, hidden, experts, weights)
    return found
