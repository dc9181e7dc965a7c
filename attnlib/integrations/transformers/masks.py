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
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers.patterns import MaskFunction, Pattern, recognize
from attnlib.spec import Window

__all__ = [
    "MaskTensor",
    "Rows",
    "StepMask",
    "attnlib_mask",
    "first_visible_key",
    "read_mask",
    "refuse_export",
]


@dataclass(frozen=True, eq=False)
class Rows:
    """The tokens of a padded batch, on the host.

    Attributes:
        keys: `[B, width]` bool; columns of the mask that are tokens.
        real: `[B, T]` bool; queries (the last T columns) that are tokens.
        trailing: `[B, T]` bool; padding queries after the last token of their row. They see the
            whole row.
        contiguous: no row has padding between its tokens, so a distance in columns is a distance
            in tokens.
        interleaved: some padding query is between tokens. No request of tokens represents it.
    """

    keys: np.ndarray
    real: np.ndarray
    trailing: np.ndarray
    contiguous: bool
    interleaved: bool

    @classmethod
    def read(cls, padding: torch.Tensor, num_queries: int) -> Rows | None:
        """The rows of a `[B, width]` bool mask, or None without padding. Synchronizes."""
        keys = padding.cpu().numpy()
        return None if keys.all() else cls.of(keys, num_queries)

    @classmethod
    def of(cls, keys: np.ndarray, num_queries: int) -> Rows:
        """The rows of a `[B, width]` bool mask on the host."""
        counts = keys.sum(1, keepdims=True)
        seen = keys.cumsum(1)
        contiguous = bool((((seen > 0) & (seen < counts)) <= keys).all())
        queries = slice(max(0, keys.shape[1] - num_queries), None)
        real, seen = keys[:, queries], seen[:, queries]
        after_first = ~real & (seen > 0)
        trailing = after_first & (seen == counts)
        return cls(keys, real, trailing, contiguous, bool((after_first & ~trailing).any()))


@dataclass(eq=False)
class StepMask:
    """The mask of one step and layer type.

    Attributes:
        pattern: the mask as kernel arguments; None if only the evaluated mask expresses it.
        batch_size, q_length, kv_length: B, T and S of the attention call.
        q_offset: position of the first query in `attention_mask`.
        kv_offset: position of the first key in `attention_mask`; positive once a sliding cache has
            dropped keys.
        mask_function: the description by transformers.
        attention_mask: `[B, tokens]` bool, True for tokens; None without padding.
        device: device of the model's input.
        use_vmap: how transformers evaluates `mask_function`.
        plans: cache of everything that the layers of this step derive from the mask.
    """

    pattern: Pattern | None
    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int = 0
    kv_offset: int = 0
    mask_function: MaskFunction | None = None
    attention_mask: torch.Tensor | None = None
    device: torch.device | str = "cpu"
    use_vmap: bool = False
    plans: dict[Any, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Number of keys that exist. A static cache has further keys that are not written yet."""
        if self.pattern is None or not self.pattern.causal:
            return self.kv_length
        return min(self.kv_length, self.q_offset + self.q_length - self.kv_offset)

    def padding(self) -> torch.Tensor | None:
        """`[B, width]` bool, True for tokens; None without padding."""
        if self.attention_mask is None:
            return None
        mask, end = self.attention_mask, self.kv_offset + self.width
        if mask.shape[-1] < end:
            mask = torch.nn.functional.pad(mask, (0, end - mask.shape[-1]))
        return mask[:, self.kv_offset : end]

    def rows(self) -> Rows | None:
        """The rows of the batch, read once per step; None without padding."""
        if "rows" not in self.plans:
            padding = self.padding()
            self.plans["rows"] = None if padding is None else Rows.read(padding, self.q_length)
        rows: Rows | None = self.plans["rows"]
        return rows

    def dense(self) -> torch.Tensor:
        """The evaluated mask, `[B, 1, T, S]` bool, True where visible; computed once."""
        if "dense" not in self.plans:
            self.plans["dense"] = self._evaluated()
        dense: torch.Tensor = self.plans["dense"]
        return dense

    def check(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Check that the mask was made for these tensors.

        Args:
            query: `[B, Hq, T, D]`.
            key: `[B, Hkv, S, D]`.

        Raises:
            ContractError: B, T or S differ from the sizes that transformers announced.
        """
        announced = (self.batch_size, self.q_length, self.kv_length)
        found = (query.shape[0], query.shape[2], key.shape[2])
        if found != announced:
            raise ContractError(
                f"attention got (batch, queries, keys)={found}, its mask was made for {announced}: "
                f"the mask belongs to another layer type or step; pass the mask of this layer, or "
                f"run this model with attn_implementation='sdpa'"
            )

    def _evaluated(self) -> torch.Tensor:
        if self.mask_function is None:
            return self._evaluated_pattern()
        from transformers.masking_utils import sdpa_mask

        mask: torch.Tensor | None = sdpa_mask(
            batch_size=self.batch_size,
            q_length=self.q_length,
            kv_length=self.kv_length,
            q_offset=self.q_offset,
            kv_offset=self.kv_offset,
            mask_function=self.mask_function,
            attention_mask=self.attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )
        assert mask is not None  # sdpa_mask returns None only if a skip is allowed
        return mask

    def _evaluated_pattern(self) -> torch.Tensor:
        """The mask of a module for which transformers describes none."""
        # Chunks always come with a description by transformers.
        assert self.pattern is not None and self.pattern.chunk is None
        query = (
            torch.arange(self.q_length, device=self.device)[:, None]
            + self.q_offset
            - self.kv_offset
        )
        distance = torch.arange(self.kv_length, device=self.device) - query
        left, right = self.pattern.window
        visible = torch.ones_like(distance, dtype=torch.bool) if left is None else distance >= -left
        visible = visible if right is None else visible & (distance <= right)
        keys = torch.ones(self.batch_size, self.kv_length, dtype=torch.bool, device=self.device)
        padding = self.padding()
        keys[:, self.width :] = False
        if padding is not None:
            keys[:, : self.width] = padding
        if self.pattern.segments is not None:
            segments = self.pattern.segments.to(self.device)
            visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
        return visible & keys[:, None, None, :]


class MaskTensor(torch.Tensor):
    """The float mask `[B, 1, T, S]` of a `StepMask`, evaluated on first use.

    Shape, dtype and device are known without evaluation. A move to another device or floating
    dtype, `clone` and `detach` keep the description. Every other operation computes with the
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
        args, kwargs = tree_map_only(MaskTensor, MaskTensor.evaluated, (args, kwargs))
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
        args, kwargs = tree_map_only(MaskTensor, MaskTensor.evaluated, (args, kwargs or {}))
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
    **_: Any,
) -> torch.Tensor:
    """The mask function that is registered with transformers.

    Args:
        batch_size, q_length, kv_length: B, T, S.
        q_offset, kv_offset: positions of the first query and key in `attention_mask`.
        mask_function: the description by transformers; None for causal.
        attention_mask: `[B, tokens]` bool padding mask, or None.
        dtype: dtype of the mask, should a model compute with it.
        use_vmap, device: how and where to evaluate `mask_function`.

    Returns:
        A `MaskTensor` `[B, 1, T, S]`.

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


def first_visible_key(
    step: StepMask, pattern: Pattern, padding: torch.Tensor | None
) -> int | torch.Tensor:
    """The first key that the window and the chunk of a single query leave visible.

    Args:
        step: the mask, with one query per row.
        pattern: its pattern.
        padding: `[B, tokens]` bool as in `StepMask.attention_mask`, or None.

    Returns:
        Index among the cached keys, for all rows or `[B]`; it may be negative.
    """
    first = 0 if pattern.window.left is None else step.width - 1 - pattern.window.left
    if pattern.chunk is None:
        return first
    # Chunks are counted from the first token of the row, after the padding on the left.
    left = 0 if padding is None else (padding.cumsum(1) == 0).sum(1)
    start = (step.q_offset - left) // pattern.chunk * pattern.chunk + left - step.kv_offset
    return max(start, first) if isinstance(start, int) else start.clamp(min=first)


def read_mask(mask: torch.Tensor | None) -> StepMask | torch.Tensor | None:
    """The description or the values of an attention mask.

    Returns:
        The `StepMask` of an unmodified `MaskTensor`; its values if the model wrote to them; any
        other mask as it is.
    """
    if not isinstance(mask, MaskTensor):
        return mask
    modified = mask.modified()
    return mask.step if modified is None else modified


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
