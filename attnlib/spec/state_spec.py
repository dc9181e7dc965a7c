"""`StateSpec`, the needs of a layer with a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnlib.spec.checks import as_kind
from attnlib.spec.kinds import CudaGraphSupport
from attnlib.spec.layer_spec import LayerSpec
from attnlib.spec.state_checks import check_state_spec

__all__ = ["StateSpec"]


@dataclass(frozen=True, kw_only=True)
class StateSpec(LayerSpec):
    """Everything about a state layer that may decide its backend. Validated when created.

    The rules T1 to T20 define what such a layer computes. Values of weights, the scale and the skip
    factors are parameters of the layer.

    Attributes:
        num_heads: state heads, which are the value heads (Hv); 0 for a layer with a convolution
            only.
        num_key_heads: heads of q and k (Hk); divides `num_heads`. None means `num_heads`.
        key_size: elements of one q or k head (Dk).
        value_size: elements of one v head (Dv).
        update: "delta" replaces what the state holds for the key, "add" adds to it (T2).
        decay: "head" (one decay per token and head), "channel" (one per element of the key) or
            "constant" (one per head, of the layer) (T5).
        has_beta: every call passes beta; without it, beta is 1.
        has_skip: `skip * v` is added to the output, with one factor per head.
        qk_norm: q and k heads are normalized to length 1 (T4).
        conv_channels: channels of the convolution before the recurrence (C); 0 for none.
        conv_width: tokens that the convolution sees, the token itself included (W); 0 for none.
        conv_activation: "silu" or None.
        has_conv_bias: the convolution has a bias.
        dtype: dtype of x, q, k, v, the output and the window.
        state_dtype: float32 or bfloat16, the dtype in which states are stored (T13).
        max_rollback: tokens of the last step that the next one may take back (D, T10).
        batch_invariant: the bits of a row must not depend on the other rows of the batch, nor on
            the division of a request into steps (T18).
        chunk_size: tokens after which a tail is added to its state (c, T9); a power of two of at
            least 16. None lets the backend choose.
        form: form of a slot, "plain", "snapshots" or "tail" (T9). None means the first one of the
            backend that fits the spec.
        cudagraph: which batches must be capturable in a CUDA graph.

    Raises:
        ContractError: no state layer can have this value; the message names the field, the value
            and the limit.
    """

    kind: ClassVar[str] = "state"

    num_heads: int = 0
    num_key_heads: int = None  # type: ignore[assignment]  # __post_init__ replaces None
    key_size: int = 0
    value_size: int = 0
    update: str = "delta"
    decay: str = "head"
    has_beta: bool = True
    has_skip: bool = False
    qk_norm: bool = False
    conv_channels: int = 0
    conv_width: int = 0
    conv_activation: str | None = "silu"
    has_conv_bias: bool = False
    dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32
    max_rollback: int = 0
    batch_invariant: bool = False
    chunk_size: int | None = None
    form: str | None = None
    cudagraph: CudaGraphSupport = CudaGraphSupport.NEVER

    def __post_init__(self) -> None:
        if self.num_key_heads is None:
            object.__setattr__(self, "num_key_heads", self.num_heads)
        kind = as_kind("cudagraph", self.cudagraph, CudaGraphSupport)
        object.__setattr__(self, "cudagraph", kind)
        check_state_spec(self)
        self._freeze()

    __hash__ = LayerSpec.__hash__

    def _derived(self) -> dict[str, Any]:
        return {"num_key_heads": self.num_heads}

    @property
    def is_paged(self) -> bool:
        """False: a state layer has no paged cache of keys."""
        return False

    @property
    def has_recurrence(self) -> bool:
        """False for a layer with a convolution only."""
        return self.num_heads > 0

    @property
    def has_convolution(self) -> bool:
        """Whether the layer has a convolution and its window."""
        return self.conv_channels > 0

    @property
    def group_size(self) -> int:
        """State heads per key head."""
        return self.num_heads // max(self.num_key_heads, 1)

    @property
    def default_scale(self) -> float:
        """1 / sqrt(Dk)."""
        return self.key_size**-0.5 if self.key_size else 1.0

    def input_shapes(self, tokens: int) -> dict[str, tuple[int, ...]]:
        """The shape of each input of the recurrence; a constant decay is the layer's `[Hv]`."""
        keys, heads = (tokens, self.num_key_heads, self.key_size), (tokens, self.num_heads)
        decays = {"head": heads, "channel": (*heads, self.key_size), "constant": heads[1:]}
        values, decay = (*heads, self.value_size), decays[self.decay]
        return {"query": keys, "key": keys, "value": values, "log_decay": decay, "beta": heads}

    def fits(self, form: str) -> bool:
        """Whether slots of a form serve the spec: only `tail` is batch invariant (T18), and
        `plain` takes no token of a recurrence back (T10)."""
        if self.form not in (None, form):
            return False
        if form == "tail" or self.batch_invariant:
            return form == "tail"
        return form == "snapshots" or not (self.has_recurrence and self.max_rollback)
