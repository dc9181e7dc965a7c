"""Lengths on the host, for builders that plan there. An engine may leave them out."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["LengthsRead", "check_type", "with_host_lengths"]


class LengthsRead:
    """The lengths on the device at the time when a builder read their copies on the host.

    Args:
        common: the batch, on another device than the CPU.
    """

    def __init__(self, common: CommonAttentionMetadata) -> None:
        tensors = {"seq_lens": common.seq_lens, "query_start_loc": common.query_start_loc}
        # Tensors of inference mode do not count their changes.
        self._versions = [(n, x, x._version) for n, x in tensors.items() if not x.is_inference()]

    def check(self) -> None:
        """Whether the tensors are as they were; reads no values.

        Raises:
            ContractError: one changed in place.
        """
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise ContractError(
                    f"{name} changed in place after its copy on the host was read, which this "
                    "backend would not notice: build the metadata again",
                    rule="M1",
                )


def check_type(common: object) -> None:
    """Check that a builder was given a batch.

    Raises:
        ContractError: an object of another type.
    """
    if not isinstance(common, CommonAttentionMetadata):
        action = "use CommonAttentionMetadata.from_lengths"
        if hasattr(common, "build"):  # a `StateGroupBatch`, which has metadata for each layer
            action = "call its method build(builder)"
        raise ContractError(
            f"common_attn_metadata is a {type(common).__name__}; build needs a "
            f"CommonAttentionMetadata: {action}"
        )


def with_host_lengths(common: CommonAttentionMetadata, reader: str) -> CommonAttentionMetadata:
    """The batch with `query_start_loc_cpu` and `seq_lens_cpu`. No device sync.

    The tensors of a batch on the CPU are on the host already and are their own host copies, so that
    changes in place reach every reader.

    Args:
        common: the batch.
        reader: the class that reads the lengths, for messages.

    Raises:
        ContractError: a batch on another device has no host lengths, or host lengths that cannot
            be those of the batch: different from the tensors (CPU), or 0 for every request.
    """
    check_type(common)
    missing: dict[str, Any] = {}
    for name in ("query_start_loc", "seq_lens"):
        tensor, host = getattr(common, name), getattr(common, f"{name}_cpu")
        if tensor.device.type != "cpu":
            if host is None:
                raise ContractError(
                    f"{reader} needs {name}_cpu, but the batch has None and {name} is on "
                    f"{tensor.device}: pass {name}_cpu, or select a backend whose builder has "
                    "needs_host_lengths=False"
                )
            continue
        if host is not tensor:
            missing[f"{name}_cpu"] = tensor
        if host is not None and host.dtype == tensor.dtype and not torch.equal(host, tensor):
            raise ContractError(
                f"{name}_cpu is {host.tolist()}, but {name} is {tensor.tolist()}, and {reader} "
                f"reads {name}_cpu: pass equal values, or {name}_cpu=None",
                rule="M1",
            )
    filled = common.replace(**missing) if missing else common
    lengths = filled.seq_lens_cpu
    if filled.num_actual_tokens and filled.max_seq_len and not filled.is_cross_attention:
        assert lengths is not None  # passed or filled above
        if bool((filled.query_lens_cpu > 0).any()) and not bool(lengths.any()):
            raise ContractError(
                f"seq_lens_cpu is 0 for all {filled.num_reqs} requests of a batch with new tokens, "
                f"and {reader} reads it: pass the lengths, or None if the host does not have them",
                rule="M1",
            )
    return filled
