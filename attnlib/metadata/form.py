"""Checks of a batch when it is made: dtypes, shapes, devices and upper bounds, on host memory only.

Tensors that are assigned later are not checked again; use `CommonAttentionMetadata.replace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from attnlib.errors import ContractError

if TYPE_CHECKING:
    from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["check_form", "check_types"]

_INT32 = torch.int32


def check_form(common: CommonAttentionMetadata) -> None:
    """Check the tensors and bounds of a batch.

    Raises:
        ContractError: the message names the tensor, what it is and what it must be.
    """
    table, slots, starts_cpu = (
        common.block_table_tensor,
        common.slot_mapping,
        common.query_start_loc_cpu,
    )
    for name, given in (
        ("query_start_loc", common.query_start_loc),
        ("seq_lens", common.seq_lens),
        ("block_table_tensor", table),
        ("slot_mapping", slots),
        ("query_bias", common.query_bias),
    ):
        if given is not None and not isinstance(given, torch.Tensor):
            raise ContractError(
                f"{name} is a {type(given).__name__}; it must be a tensor "
                "(CommonAttentionMetadata.from_lengths takes lists of lengths and blocks)",
                rule="M1",
            )
    reqs, tokens, device = common.num_reqs, common.num_actual_tokens, common.query_start_loc.device
    if (
        _differs(common.query_start_loc, _INT32, (reqs + 1,))
        or _differs(common.seq_lens, _INT32, (reqs,))
        or common.seq_lens.device != device
        or _is_wrong_host_copy(starts_cpu, reqs + 1)
        or _is_wrong_host_copy(common.seq_lens_cpu, reqs)
        or _is_wrong_host_copy(common.num_computed_tokens_cpu, reqs)
    ):
        raise _wrong_lengths(common)
    if table is not None and (
        table.dtype != _INT32
        or table.dim() != 2
        or table.shape[0] != reqs
        or table.device != device
    ):
        raise _wrong("block_table_tensor", table, f"int32 [{reqs}, max_blocks]", device, "P3")
    if slots is not None and (
        slots.dtype != torch.int64 or slots.dim() != 1 or slots.device != device
    ):
        raise _wrong("slot_mapping", slots, f"int64 [{tokens}]", device, "P4")
    _check_causal(common.causal, reqs, device)
    for name, named in (
        ("state_slots", common.state_slots),
        ("state_sources", common.state_sources),
    ):
        if named is not None:
            check_slots_form(name, named, reqs, device)
    if common.query_bias is not None:
        _check_bias(common.query_bias, tokens, common.max_query_len, device)
    _check_bounds(common)


def check_types(common: CommonAttentionMetadata) -> None:
    """Whether the fields of a batch that hold tensors do.

    Raises:
        ContractError: names the first one that has another type.
    """
    for field in fields(common):
        value = getattr(common, field.name)
        is_given = value is not None or field.name in ("query_start_loc", "seq_lens")
        if "Tensor" in str(field.type) and is_given and not isinstance(value, bool | Mapping):
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                kind = "0-d tensor" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ContractError(
                    f"{field.name} is a {kind}; it must be a tensor "
                    "(CommonAttentionMetadata.from_lengths takes lists of lengths and blocks)",
                    rule="M1",
                )


def check_slots_form(name: str, slots: torch.Tensor, reqs: int, device: torch.device) -> None:
    """Whether a tensor may hold the slots of `reqs` requests.

    Raises:
        ContractError: it is not int32 `[reqs]` on the device.
    """
    if not isinstance(slots, torch.Tensor):
        raise ContractError(
            f"{name} is a {type(slots).__name__}; it must be a tensor, int32 [{reqs}] on {device}",
            rule="T7",
        )
    if _differs(slots, _INT32, (reqs,)) or slots.device != device:
        raise _wrong(name, slots, f"int32 [{reqs}]", device, "T7")


def _differs(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return tensor.dtype != dtype or tensor.shape != shape


def _is_wrong_host_copy(tensor: torch.Tensor | None, count: int) -> bool:
    return tensor is not None and (
        _differs(tensor, _INT32, (count,)) or tensor.device.type != "cpu"
    )


def _wrong_lengths(common: CommonAttentionMetadata) -> ContractError:
    """The error for the first wrong tensor of lengths."""
    reqs, device = common.num_reqs, common.query_start_loc.device
    cpu = torch.device("cpu")
    for name, count, place in (
        ("query_start_loc", reqs + 1, device),
        ("query_start_loc_cpu", reqs + 1, cpu),
        ("seq_lens", reqs, device),
        ("seq_lens_cpu", reqs, cpu),
        ("num_computed_tokens_cpu", reqs, cpu),
    ):
        tensor = getattr(common, name)
        if tensor is None and name.endswith("_cpu"):
            continue
        if _differs(tensor, _INT32, (count,)) or tensor.device != place:
            return _wrong(name, tensor, f"int32 [{count}] for num_reqs={reqs}", place, "M1")
    raise AssertionError("every tensor of lengths is right")


def _wrong(
    name: str, tensor: torch.Tensor, wanted: str, device: torch.device, rule: str
) -> ContractError:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ContractError(
        f"{name} is {dtype} {list(tensor.shape)} on {tensor.device}; it must be {wanted} on "
        f"{device}",
        rule=rule,
    )


def _check_causal(causal: object, reqs: int, device: torch.device) -> None:
    if isinstance(causal, torch.Tensor):
        if _differs(causal, torch.bool, (reqs,)) or causal.device != device:
            raise _wrong("causal", causal, f"bool [{reqs}], or one bool", device, "M1")
    elif causal is not None and not isinstance(causal, bool):
        raise ContractError(
            f"causal={causal!r} must be True, False, None or a tensor, bool [{reqs}] on {device}",
            rule="M1",
        )


def _check_bias(bias: torch.Tensor, tokens: int, columns: int, device: torch.device) -> None:
    if (
        bias.dtype != torch.float32
        or bias.dim() != 2
        or bias.shape[0] < tokens
        or bias.shape[1] < columns
        or bias.device != device
    ):
        raise _wrong("query_bias", bias, f"float32 [{tokens}, >= {columns}]", device, "M3")


def _check_bounds(common: CommonAttentionMetadata) -> None:
    """Lengths on the host, and starts of a batch on the CPU, that decrease or exceed their upper
    bounds. Kernels would drop the rest, or write outside of their memory. Sequence lengths without
    a copy may be written later, and layers check them."""
    if common.num_reqs == 0:
        return
    starts, lengths = common.query_start_loc_cpu, common.seq_lens_cpu
    if starts is not None:
        _check_query_lens(common, starts)
    if lengths is not None:
        _check_bound("max_seq_len", common.max_seq_len, lengths, "seq_lens")
    own = common.query_start_loc
    if own.is_cpu and own is not starts and not torch.compiler.is_compiling():
        _check_query_lens(common, own)


def _check_query_lens(common: CommonAttentionMetadata, starts: torch.Tensor) -> None:
    first, end = int(starts[0]), int(starts[-1])
    if first:
        raise ContractError(f"query_start_loc begins at {first}; it must be 0", rule="M1")
    if end > common.num_actual_tokens:
        raise ContractError(
            f"query_start_loc ends at {end}, but num_actual_tokens="
            f"{common.num_actual_tokens}: it must be at least the tokens of the requests",
            rule="M1",
        )
    lengths = starts[1:] - starts[:-1]
    _check_bound("max_query_len", common.max_query_len, lengths, "the query length")


def _check_bound(name: str, bound: int, lengths: torch.Tensor, of: str) -> None:
    least, largest = (int(x) for x in lengths.aminmax())
    if least < 0:
        raise ContractError(
            f"{of} of request {int(lengths.argmin())} is {least}; it must not be negative",
            rule="M7",
        )
    if largest > bound:
        raise ContractError(
            f"{name}={bound} is below {of} {largest} of request {int(lengths.argmax())}: it must "
            "be an upper bound",
            rule="M1",
        )
