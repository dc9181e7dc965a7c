"""The attention mask of one step: a description, evaluated only where kernels cannot apply it.

transformers calls `attnlib_mask` once per step and layer type. The result is a `MaskTensor`, which
carries a `StepMask` through the model to the attention function. Creating it neither reads from the
device nor allocates a `[T, S]` tensor. Everything derived from the mask (lengths, block tables,
backend metadata) is cached in the `StepMask`, so all layers of a step share it and it is released
with the step.

To the code of a model a `MaskTensor` is the float mask `[B, 1, T, S]` that eager attention gets.
Models that index, concatenate or add masks themselves therefore compute with the right values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers import devices
from attnlib.integrations.transformers.described_mask import describe_tensor
from attnlib.integrations.transformers.eager_models import take_masks_of_numbers
from attnlib.integrations.transformers.mask_tensor import MaskTensor
from attnlib.integrations.transformers.patterns import MaskFunction, Pattern, recognize
from attnlib.integrations.transformers.single_query import counted_mask, single_query_mask
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.integrations.transformers.traced import evaluated_mask, is_compiled
from attnlib.spec import Window

__all__ = ["attnlib_mask", "refuse_export"]


def attnlib_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> torch.Tensor | None:
    """The mask function that is registered with transformers.

    Args:
        batch_size, q_length, kv_length: B, T, S.
        q_offset, kv_offset: positions of the first query and key in `attention_mask`.
        mask_function: the description by transformers; None for causal.
        attention_mask: `[B, tokens]` bool padding mask, or None.
        dtype: dtype of the mask, should a model compute with it.
        use_vmap, device: how and where to evaluate `mask_function`.
        allow_is_bidirectional_skip: whether None may stand for a mask that shows everything, as for
            sdpa. Layers that shorten the sequence (Informer) rely on it.
        options: further arguments of the mask function of sdpa.

    Returns:
        `[B, 1, T, S]`: a plain tensor for static caches and in compiled code, bool if the model is
        known to take such masks, a `MaskTensor` for others; None where every query sees every key.

    Raises:
        ContractError: `attention_mask` is not `[B, tokens]`.
        UnsupportedConfigError: the model is exported or traced.
    """
    given = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "dtype": dtype if dtype.is_floating_point else torch.float32,
        "use_vmap": use_vmap,
        "device": device,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        **options,
    }
    if isinstance(q_offset, torch.Tensor) and (mask := _decode_mask(given)) is not None:
        return mask
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return _traced_mask(given)
    if attention_mask is not None:
        _check_padding(attention_mask, batch_size)
    return _described(given)


def _traced_mask(given: dict[str, Any]) -> torch.Tensor | None:
    """The mask in a trace of torch.compile; others are refused."""
    if not is_compiled():
        refuse_export()
    return evaluated_mask(given)


def _decode_mask(given: dict[str, Any]) -> torch.Tensor | None:
    """The mask of single queries over a static cache, in few calls: a token of a small model takes
    so little time on a CPU that calls count. None for what needs another path."""
    counter, function = given["q_offset"], given["mask_function"]
    if devices.kind_of(counter.device) != "cpu" or function is None:
        return None
    if torch.compiler.is_compiling() or torch._C._is_tracing() or given["q_length"] != 1:
        return None
    pattern, padding = recognize(function), given["attention_mask"]
    if pattern is None or not pattern.causal or _takes_numbers(given):
        return None
    if torch.is_inference_mode_enabled():  # its tensors do not count writes
        return None
    batch = given["batch_size"]
    if padding is not None:
        _check_padding(padding, batch)
    step = StepMask(
        *(pattern, batch, 1, given["kv_length"], int(counter), given["kv_offset"]),
        *(function, padding, given["device"]),
    )
    mask = single_query_mask(step)
    return None if mask is None else describe_tensor(mask, step)


def _described(given: dict[str, Any]) -> torch.Tensor | None:
    """The mask of a step that is not compiled.

    Args:
        given: arguments of the mask function.
    """
    function, padding = given["mask_function"], given["attention_mask"]
    pattern = Pattern(True, Window(None, 0)) if function is None else recognize(function)
    if given["allow_is_bidirectional_skip"] and padding is None and pattern == Pattern(False):
        return None
    # A mask is a plain tensor, which compiled code may take, over a static cache. Such a cache
    # counts its tokens in a tensor, and those of a window in an integer, but its decodes must have
    # a mask. Models that ask for one with other caches compute with floats.
    is_plain = isinstance(given["q_offset"], torch.Tensor) or (
        given["q_length"] == 1
        and given.get("allow_is_causal_skip") is False
        and _is_window(pattern)
    )
    if is_plain and _takes_numbers(given):
        return evaluated_mask(given | {"allow_is_causal_skip": False})
    if is_plain and given["q_length"] == 1 and _is_cuda(given["device"]):
        mask = _values(given, partial(counted_mask, pattern, given))
        if mask is not None:  # reading the counter would wait
            return describe_tensor(mask, _shown(mask))
    step = StepMask(
        pattern,
        *(given["batch_size"], given["q_length"], given["kv_length"]),
        # A static cache returns its counter tensor, which has advanced by the time the layers run.
        int(given["q_offset"]),
        given["kv_offset"],
        function,
        padding,
        given["device"],
        given["use_vmap"],
    )
    mask = _values(given, partial(single_query_mask, step)) if is_plain else None
    return MaskTensor(step, given["dtype"]) if mask is None else describe_tensor(mask, step)


def _shown(mask: torch.Tensor) -> StepMask:
    """The description of a mask of single queries by its values, which are not read."""
    batch, _, _, keys = mask.shape
    # A view would keep the mask, and the mask its description.
    visible, causal = mask.data[:, 0, 0], Pattern(True, Window(None, 0))
    return StepMask(
        causal, batch, 1, keys, keys - 1, attention_mask=visible, device=mask.device, is_static=True
    )


def _takes_numbers(given: dict[str, Any]) -> bool:
    found: bool = take_masks_of_numbers(type(given.get("config")).__module__)
    return found


def _is_cuda(device: torch.device | str) -> bool:
    return devices.kind_of(torch.device(device)) == "cuda"


def _is_window(pattern: Pattern | None) -> bool:
    """Whether a mask hides keys by their distance, and describes no sequences or spans."""
    if pattern is None or not pattern.causal or not pattern.depends_on_distance:
        return False
    return pattern.spans is None and pattern.segments is None


def _values(given: dict[str, Any], few: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    """The mask as values, by the few operations that a single query needs, where these suffice."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # so that it counts writes
            return _values(given, few)
    mask = few()
    return evaluated_mask(given | {"allow_is_causal_skip": False}) if mask is None else mask


def _check_padding(attention_mask: torch.Tensor, batch_size: int) -> None:
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size:
        raise ContractError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; for a batch of {batch_size} "
            f"rows it must be [{batch_size}, tokens]: pass one row of padding for each sequence"
        )


def refuse_export() -> None:
    """Refuse `torch.export` and tracing: a recorded graph would contain the lengths of one batch.

    Raises:
        UnsupportedConfigError: the model is being exported or traced.
    """
    if torch.compiler.is_exporting() or torch._C._is_tracing():
        _refuse_export()


_NO_EXPORT = (
    "attnlib plans each batch on the host, which torch.export and torch.jit.trace cannot record: "
    "export the model with attn_implementation='eager'"
)


@torch.compiler.disable(reason=_NO_EXPORT)  # type: ignore[untyped-decorator, no-untyped-call]
def _refuse_export() -> None:
    """Not traced by a strict export, which reports how it fails to trace an exception; it shows the
    reason of a function that is not traced."""
    raise UnsupportedConfigError(_NO_EXPORT)
