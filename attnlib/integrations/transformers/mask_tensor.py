"""The attention mask of one step as a tensor, whose values are computed only where they are used.

To the code of a model a `MaskTensor` is the float mask `[B, 1, T, S]` that eager attention gets.
Models that index, concatenate or add masks themselves therefore compute with the right values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map_only

from attnlib.integrations.transformers.step_mask import StepMask

__all__ = ["EntryMask", "MaskTensor", "tensor_writes"]


class MaskTensor(torch.Tensor):
    """The float mask `[B, 1, T, S]` of a `StepMask`, evaluated on first use.

    Shape, dtype and device are known without evaluation. A move to another device or floating
    dtype, `clone`, `detach` and appended entries (`EntryMask`) keep the description. Every other
    operation computes with the values: 0 for visible keys, the dtype's lowest number for others.

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
            with torch.inference_mode(False), torch.no_grad():  # so that it counts writes
                visible = self.step.dense().to(self.device)
                hidden = torch.finfo(self.dtype).min
                self._cached = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
                self._cached.masked_fill_(~visible, hidden)
            self._cached_version = tensor_writes(self._cached)
        return self._cached

    def modified(self) -> torch.Tensor | None:
        """The values if they may have been modified since the evaluation, else None."""
        if self._cached is None:
            return None
        # Inference tensors have no version counter, so a write to them cannot be excluded.
        unchanged = tensor_writes(self._cached) == self._cached_version >= 0
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
            extended = _extended(func, args, kwargs)
            if extended is not None:
                return extended
        if func is torch.cat:
            args = _as_numbers(args)
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


def _as_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `torch.cat` with masks of static caches, which are bool, as floats."""
    parts, *others = args
    dtype = next(part.dtype for part in parts if isinstance(part, MaskTensor))
    hidden = torch.finfo(dtype).min
    numbers = [
        torch.zeros_like(part, dtype=dtype).masked_fill_(~part, hidden)
        if part.dtype == torch.bool
        else part
        for part in parts
    ]
    return (numbers, *others)


def _parsed_to(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype of the arguments of `Tensor.to`, None where they do not change."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, args[0].dtype
    known = {name: value for name, value in kwargs.items() if name != "copy"}
    device, dtype, *_ = torch._C._nn._parse_to(*args, **known)
    return cast("torch.device | None", device), cast("torch.dtype | None", dtype)


def tensor_writes(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor; -1 for inference tensors, which do not count them."""
    return -1 if tensor.is_inference() else tensor._version


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


class EntryMask(MaskTensor):
    """The mask `[B, 1, T, S + E]` of own keys and entries, evaluated on first use.

    Attributes:
        step: the description of the first S columns.
        own: the mask of these columns.
        bias: `[B, 1, T, E]`, 0 where an entry is visible and -inf where it is hidden; None where
            all are visible.
        num_entries: E.
    """

    own: MaskTensor
    bias: torch.Tensor | None
    num_entries: int

    @staticmethod
    def __new__(
        cls: type[EntryMask], own: MaskTensor, bias: torch.Tensor | None, num_entries: int
    ) -> EntryMask:
        """The mask of `own` with further columns."""
        size = (*own.shape[:-1], own.shape[-1] + num_entries)
        made: EntryMask = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=own.dtype, device=own.device
        )
        made.step, made._cached, made._cached_version = own.step, None, 0
        made.own, made.bias, made.num_entries = own, bias, num_entries
        return made

    def evaluated(self) -> torch.Tensor:
        """The values `[B, 1, T, S + E]`; computed once."""
        if self._cached is None:
            own, bias = self.own.evaluated(), self.bias
            if bias is None:
                bias = own.new_zeros((*own.shape[:-1], self.num_entries))
            self._cached = torch.cat((own, bias), dim=-1)
            self._cached_version = -1  # a write cannot be excluded
        return self._cached

    def _copied(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> MaskTensor | None:
        return None


def _extended(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EntryMask | None:
    """The mask that a model makes by appending columns of entries to the one of the step; None for
    every other operation."""
    if func is torch.cat and len(args) == 1 and kwargs == {"dim": -1} and len(args[0]) == 2:
        own, bias = args[0]
        if (
            type(own) is MaskTensor
            and own.modified() is None
            and type(bias) is torch.Tensor
            and bias.dim() == 4
            and bias.shape[:3] == own.shape[:3]
            and bias.dtype == own.dtype
        ):
            return EntryMask(own, bias, bias.shape[3])
    if func is torch.nn.functional.pad and type(args[0]) is MaskTensor:
        own, sizes = args[0], args[1]
        options = {"mode": "constant", "value": 0.0} | kwargs
        zeros = options == {"mode": "constant", "value": 0.0}
        if zeros and own.modified() is None and len(sizes) == 2 and sizes[0] == 0 < sizes[1]:
            return EntryMask(own, None, sizes[1])
    return None
