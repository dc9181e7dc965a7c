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
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map_only

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers.patterns import MaskFunction, Pattern, recognize
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.spec import Window

__all__ = ["MaskTensor", "attnlib_mask", "known_step", "read_mask", "refuse_export"]


class MaskTensor(torch.Tensor):
    """The float mask `[B, 1, T, S]` of a `StepMask`, evaluated on first use.

    Shape, dtype and device are known without evaluation. A move to another device or floating
    dtype, `clone` and `detach` keep the description; so do columns of entries that are appended
    (`two_streams`). Every other operation computes with the
    values: 0 where a key is visible, the lowest number of the dtype where it is hidden.

    Attributes:
        step: the description.
    """

    step: StepMask
    _cached: torch.Tensor | None
    _cached_version: int

    @staticmethod
    def __new__(
        cls: type[MaskTensor],
        step: StepMask,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> MaskTensor:
        """A mask that has no storage until it is evaluated."""
        size = (step.batch_size, 1, step.q_length, step.kv_length)
        where = torch.device(step.device if device is None else device)
        mask: MaskTensor = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=where)
        mask.step, mask._cached, mask._cached_version = step, None, 0
        return mask

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # untyped in torch
        return f"MaskTensor({list(self.shape)}, {self.dtype}, {self.device}, {self.step.pattern})"

    def evaluated(self) -> torch.Tensor:
        """The values `[B, 1, T, S]`; computed once, so that writes to them are kept."""
        if self._cached is None:
            visible = self.step.dense().to(self.device)
            hidden = torch.finfo(self.dtype).min
            self._cached = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self._cached.masked_fill_(~visible, hidden)
            self._cached_version = _version(self._cached)
        return self._cached

    def modified(self) -> torch.Tensor | None:
        """The values if they may have been modified since the evaluation, else None."""
        if self._cached is None:
            return None
        # Inference tensors have no version counter, so a write to them cannot be excluded.
        unchanged = _version(self._cached) == self._cached_version >= 0
        return None if unchanged else self._cached

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata, keep the description in copies, evaluate the mask for the rest."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _COPIES and isinstance(args[0], MaskTensor):
            copied = args[0]._copied(func, args[1:], kwargs)
            if copied is not None:
                return copied
        if func in _APPENDS:
            from attnlib.integrations.transformers.two_streams import extended_mask

            extended = extended_mask(func, args, kwargs)
            if extended is not None:
                return extended
        args, kwargs = tree_map_only(MaskTensor, lambda mask: mask.evaluated(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as an instance method
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Evaluate the mask for operations that are called below `__torch_function__`."""
        given = (args, kwargs or {})
        args, kwargs = tree_map_only(MaskTensor, lambda mask: mask.evaluated(), given)
        return func(*args, **kwargs)

    def _copied(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> MaskTensor | None:
        """The mask after a copy or a move; None if only the values can be copied."""
        device: torch.device | None = self.device
        dtype: torch.dtype | None = self.dtype
        if func is torch.Tensor.to:
            device, dtype = _parsed_to(args, kwargs)
        elif func is torch.Tensor.cpu:
            device = torch.device("cpu")
        elif func is torch.Tensor.cuda:
            return None
        dtype = dtype or self.dtype
        if self.modified() is not None or not dtype.is_floating_point:
            return None
        return MaskTensor(self.step, dtype, device or self.device)


_METADATA = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn")
        ),
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("is_cuda", "is_meta", "is_leaf", "is_nested", "is_sparse", "is_quantized")
        ),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride),
        *(torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.Tensor.is_complex),
        *(torch.Tensor.__hash__, torch.Tensor.__len__, torch.Tensor.is_inference),
    ]
)
_COPIES = frozenset(
    [
        *(torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.clone, torch.clone),
        *(torch.Tensor.detach, torch.detach, torch.Tensor.contiguous),
    ]
)


_APPENDS = frozenset([torch.cat, torch.nn.functional.pad])


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
    **_: Any,
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

    Returns:
        A `MaskTensor` `[B, 1, T, S]`, or None where every query sees every key.

    Raises:
        ContractError: `attention_mask` is not `[B, tokens]`.
        UnsupportedConfigError: the model is exported or traced.
    """
    refuse_export()
    if attention_mask is not None and (
        attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size
    ):
        raise ContractError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; for a batch of {batch_size} "
            f"rows it must be [{batch_size}, tokens]: pass one row of padding for each sequence"
        )
    pattern = Pattern(True, Window(None, 0)) if mask_function is None else recognize(mask_function)
    if allow_is_bidirectional_skip and attention_mask is None and pattern == Pattern(False):
        return None
    step = StepMask(
        pattern,
        batch_size,
        q_length,
        kv_length,
        # A static cache returns its counter tensor, which has advanced by the time the layers run.
        int(q_offset),
        kv_offset,
        mask_function,
        attention_mask,
        device,
        use_vmap,
    )
    return MaskTensor(step, dtype if dtype.is_floating_point else torch.float32)


def read_mask(mask: torch.Tensor | None) -> StepMask | torch.Tensor | None:
    """The description or the values of an attention mask.

    Returns:
        The `StepMask` of an unmodified `MaskTensor`; its values if the model wrote to them; any
        other mask as it is.
    """
    if type(mask) is not MaskTensor:
        return mask.evaluated() if isinstance(mask, MaskTensor) else mask
    modified = mask.modified()
    return mask.step if modified is None else modified


def known_step(mask: torch.Tensor | None) -> StepMask | None:
    """The `StepMask` of an unmodified `MaskTensor`; None for everything else."""
    return mask.step if type(mask) is MaskTensor and mask.modified() is None else None


def refuse_export() -> None:
    """Refuse `torch.export` and tracing: a recorded graph would contain the lengths of one batch.

    Raises:
        UnsupportedConfigError: the model is being exported or traced.
    """
    if torch.compiler.is_exporting() or torch._C._is_tracing():
        raise UnsupportedConfigError(
            "attnlib plans each batch on the host, which torch.export and torch.jit.trace cannot "
            "record: export the model with attn_implementation='sdpa'"
        )


def _parsed_to(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype of the arguments of `Tensor.to`, None where they do not change."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, args[0].dtype
    known = {name: value for name, value in kwargs.items() if name != "copy"}
    device, dtype, *_ = torch._C._nn._parse_to(*args, **known)
    return cast("torch.device | None", device), cast("torch.dtype | None", dtype)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
