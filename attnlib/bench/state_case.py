"""Cases of state layers: a batch of requests with equal lengths over the layer of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnlib.bench.case import DECODE_TOKENS, BenchCase
from attnlib.errors import ContractError
from attnlib.spec import StateSpec
from attnlib.testing.batch_spec import BatchSpec

__all__ = ["CONTEXT", "MODELS", "AnyCase", "StateCase"]

CONTEXT = 1024
"""Tokens before a decode, a multiple of every chunk size."""

MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-next": dict(num_heads=32, num_key_heads=16, key_size=128, value_size=128, qk_norm=True),
    "kimi-linear": dict(num_heads=32, key_size=128, value_size=128, decay="channel", qk_norm=True),
    "nemotron-h": dict(num_heads=128, num_key_heads=8, key_size=128, value_size=64, update="add"),
}
"""Model -> fields of the spec of its state layers."""


@dataclass(frozen=True, kw_only=True)
class StateCase:
    """A batch of requests with equal lengths over a model's state layer.

    Attributes:
        model: one of `MODELS`.
        work: "decode" (new tokens that all stay), "verify" (all but the first may be taken back),
            "prefill" (the first tokens of a request), "step" (a decode from convolution to norm),
            or "separate" (the same without the one launch that a backend may have for it).
        num_reqs: requests.
        query_len: new tokens of each.
        batch_invariant: the bits of a row do not depend on the other rows (T18).
    """

    model: str
    work: str
    num_reqs: int
    query_len: int
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        """Such as `qwen3-next-decode-64x1`."""
        ending = "-invariant" if self.batch_invariant else ""
        return f"{self.model}-{self.work}-{self.num_reqs}x{self.query_len}{ending}"

    @property
    def is_step(self) -> bool:
        """Whether the call goes from convolution to norm."""
        return self.work in ("step", "separate")

    @property
    def context(self) -> int:
        """Tokens of each request before the first call; later calls begin up to a chunk further."""
        return 0 if self.work == "prefill" else CONTEXT

    @property
    def kind(self) -> str:
        """decode or prefill, as of a `BenchCase`."""
        return "decode" if self.query_len <= DECODE_TOKENS else "prefill"

    @property
    def batch(self) -> BatchSpec:
        """The batch of the first call."""
        lengths = (self.query_len,) * self.num_reqs
        return BatchSpec(lengths, tuple(self.context + length for length in lengths))

    @property
    def spec(self) -> StateSpec:
        """The layer, in bfloat16 with float32 states."""
        fields = dict(MODELS[self.model])
        if self.is_step:
            keys = fields.get("num_key_heads", fields["num_heads"]) * fields["key_size"]
            channels = 2 * keys + fields["num_heads"] * fields["value_size"]
            fields |= {"conv_channels": channels, "conv_width": 4}
        return StateSpec(
            **fields,
            dtype=torch.bfloat16,
            max_rollback=self.query_len - 1 if self.work == "verify" else 0,
            batch_invariant=self.batch_invariant,
        )

    @property
    def shape(self) -> str:
        """Heads, sizes and features, in a few words."""
        spec = self.spec
        words = [
            f"{spec.num_heads}/{spec.num_key_heads} heads, states {spec.value_size} x "
            f"{spec.key_size}",
            f"update {spec.update}",
            f"decay per {spec.decay}",
        ]
        words += ["convolution to norm"] if self.is_step else []
        words += ["separate launches"] if self.work == "separate" else []
        words += [f"{spec.max_rollback} may be taken back"] if spec.max_rollback else []
        words += ["batch-invariant"] if self.batch_invariant else []
        return ", ".join([*words, "bfloat16"])

    def with_block_size(self, block_size: int) -> StateCase:
        """Raises: ContractError: a state layer has no pages."""
        raise ContractError(
            f"--block-size {block_size}: {self.name} has states and no pages; leave it out"
        )

    def to_json(self) -> dict[str, Any]:
        """Field -> plain value."""
        return asdict(self)


AnyCase = BenchCase | StateCase
"""A case of `attnlib bench`."""
