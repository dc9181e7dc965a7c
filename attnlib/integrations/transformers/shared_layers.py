"""Layers that read the keys of earlier layers, computed only for the tokens that are needed.

In Gemma 3n and Gemma 4 the last layers have no keys of their own (P8). Nothing that they compute
for a token is read by another token, so a step computes them for the tokens whose logits the caller
asks for. In a prefill these are the last tokens of the prompts. The same idea: YOCO (Sun et al.,
2024) and the fast prefill of vLLM.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["NeededRows", "computed_for", "needed_rows", "shared_suffix"]

_ROWS = {"hidden_states": -2, "per_layer_input": -2, "position_embeddings": -2, "position_ids": -1}
"""Argument of a decoder layer -> its dimension of tokens."""
_OTHERS = {"shared_kv_states", "attention_mask", "cache", "past_key_values", "kwargs"}
"""Arguments that do not change with the tokens that are computed. Up to transformers 5.23, the
cache is `past_key_values`."""


class NeededRows(NamedTuple):
    """The tokens that the shared layers compute: of each request a range without gaps.

    Attributes:
        rows: `[n]` int64, their rows among the tokens of the step.
        query_lens: of each request, how many of its tokens; may be 0.
        seq_lens: of each request, its keys up to the last of these tokens (M1).
        kept: `[k]` int64, the tokens that the caller asked for, as indices of `rows`.
    """

    rows: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]
    kept: torch.Tensor


def needed_rows(
    batch: CommonAttentionMetadata, rows: torch.Tensor, device: torch.device
) -> NeededRows | None:
    """The tokens to compute for the logits of `rows`; None if they are all, or unknown to the host.

    Args:
        batch: the batch, with its lengths on the host.
        rows: `[k]` int64; reading them waits for the device they are on.
        device: of the result.
    """
    if batch.query_start_loc_cpu is None or batch.seq_lens_cpu is None:
        return None
    starts, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu.tolist()
    asked = rows.tolist()
    spans: dict[int, tuple[int, int]] = {}  # request -> its first and last needed row
    for row in asked or [0]:  # a model computes at least one token
        request = bisect_right(starts, row) - 1
        first, last = spans.get(request, (row, row))
        spans[request] = (min(first, row), max(last, row))
    places: dict[int, int] = {}
    query_lens, seq_lens = [0] * len(lengths), [0] * len(lengths)
    for request in sorted(spans.keys() & range(len(lengths))):
        first, last = spans[request]
        places |= {row: len(places) + row - first for row in range(first, last + 1)}
        query_lens[request] = last + 1 - first
        seq_lens[request] = lengths[request] - (starts[request + 1] - 1 - last)
    if len(places) == starts[-1] or len(set(asked) - places.keys()):
        return None
    kept = [places[row] for row in asked]
    return NeededRows(
        torch.tensor(list(places), dtype=torch.int64, device=device),
        query_lens,
        seq_lens,
        torch.tensor(kept, dtype=torch.int64, device=device),
    )


def shared_suffix(model: nn.Module, modules: Sequence[nn.Module], shared: set[nn.Module]) -> Any:
    """The decoder layers at the end of a model whose attention reads other layers' keys.

    Args:
        model: the model.
        modules: its attention modules in the order of execution.
        shared: those without keys of their own.

    Returns:
        A list of modules. Empty if other layers follow the first shared one, or if an argument of a
        decoder layer is not known: it could depend on the tokens.
    """
    flags = [module in shared for module in modules]
    first = flags.index(True) if True in flags else len(flags)
    if not all(flags[first:]):
        return []
    layers = [
        parent for parent in model.modules() if any(child in shared for child in parent.children())
    ]
    known = _ROWS.keys() | _OTHERS
    for layer in layers:
        names = set(inspect.signature(layer.forward).parameters)
        if not names <= known or "hidden_states" not in names:
            return []
    return layers if len(layers) == len(shared) else []


@contextmanager
def computed_for(
    layers: Iterable[nn.Module], rows: torch.Tensor, num_tokens: int
) -> Iterator[None]:
    """Context in which decoder layers get the given rows of their arguments.

    Args:
        layers: as `shared_suffix` returns them.
        rows: `[n]` int64, on the device of the model.
        num_tokens: tokens of the step.
    """

    def select(value: Any, dim: int) -> Any:
        if isinstance(value, tuple):
            return tuple(select(x, dim) for x in value)
        # The output of a shared layer has the rows already when the next one gets it.
        if isinstance(value, torch.Tensor) and value.shape[dim] == num_tokens:
            return value.index_select(value.dim() + dim, rows)
        return value

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(layer.forward).bind(*args, **kwargs)
        for name, dim in _ROWS.items():
            if name in bound.arguments:
                bound.arguments[name] = select(bound.arguments[name], dim)
        return bound.args, bound.kwargs

    with ExitStack() as stack:
        for layer in layers:
            handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield
