"""What continuous batching of transformers has no public hook for.

It calls `is_flash_attention_requested`, which looks for "flash" in the name of the implementation,
to find out whether the implementation reads packed batches without a mask. If so, it accepts the
name (transformers 5.18 and later reject all others), does not replace it by an installed
flash-attn, and allocates no `[T, S]` masks. transformers downloads a package for a name that
contains "flash", so the function is replaced in the three modules that call it. The path for
decodes, with a block table, is open to FlashAttention on a GPU only, and closed to windowed layers.
Calls for all other names go to the original.

The inputs of its batches are filled on one stream, copied on a second and read on a third, without
an order: on a GPU with other work, the first batch read memory that was not filled, or was filled
after the copy, so that its tokens were wrong or no tokens at all.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers

from attnlib.errors import AttnlibError
from attnlib.integrations.transformers.continuous import check_layers
from attnlib.integrations.transformers.ring_allocator import RingAllocators, without_slot_column
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec, CudaGraphSupport

__all__ = ["KNOWN_VERSIONS", "NAMES", "seams"]

logger = logging.getLogger("attnlib")

NAMES = ("attnlib", "paged|attnlib")
"""Names of the implementation; continuous batching up to transformers 5.17 uses the second."""
KNOWN_VERSIONS = "5.17 to 5.24"
_PACKAGE = "transformers.generation.continuous_batching"
_FLASH_CHECK = ("config", "requested_attention_implementation", "version")


class _Seam(NamedTuple):
    """A function that is replaced: where it is, its parameters, and what replaces it."""

    owner: str
    name: str
    parameters: tuple[str, ...]
    make: Callable[[Any], Any]


def seams() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """(module or class, attribute, replacement of the original) of what is replaced.

    Nothing if the installed version lacks one of them: a warning then names the versions that are
    known, and `generate_batch` refuses the name, as it refuses every other.
    """
    found = []
    for seam in _SEAMS:
        owner = _owner(seam.owner)
        original = getattr(owner, seam.name, None)
        if original is None or not _has_parameters(original, seam.parameters):
            logger.warning(
                "transformers %s: %s.%s(%s) is another function or is missing, so generate_batch "
                "does not support attnlib, which knows transformers %s; generate and PagedModel do",
                *(transformers.__version__, seam.owner, seam.name, ", ".join(seam.parameters)),
                KNOWN_VERSIONS,
            )
            return
        found.append((owner, seam.name, seam.make))
    yield from found
    cache = _owner("cache")
    allocators = getattr(cache, "ATTN_TYPE_TO_ALLOCATOR", None)
    if allocators is not None and "sliding_attention" in allocators:  # from 5.18 on
        longest = "_infer_max_decode_fast_path_length"
        yield cache.PagedAttentionCache, longest, without_slot_column
        yield allocators, "sliding_attention", lambda original: RingAllocators(original, NAMES)


def _owner(path: str) -> Any:
    """A module of continuous batching, or a class in one, as "module.Class"."""
    module, _, name = path.partition(".")
    owner = importlib.import_module(f"{_PACKAGE}.{module}")
    return getattr(owner, name, None) if name else owner


def _has_parameters(function: Any, names: tuple[str, ...]) -> bool:
    return tuple(inspect.signature(function).parameters)[: len(names)] == names


def _checked_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_batch(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.config._attn_implementation not in NAMES:
            return original(self, model, *args, **kwargs)
        inputs = self.inputs_and_outputs
        if inputs.compute_stream is not None and not hasattr(inputs, "h2d_stream"):
            # Batches that do not overlap are prepared on the current stream.
            inputs.compute_stream.wait_stream(torch.cuda.current_stream(inputs.device))
        with check_layers(self.cache, model):
            return original(self, model, *args, **kwargs)

    return compute_batch


def _filled_inputs(original: Callable[..., None]) -> Callable[..., None]:
    """Other streams copy and read the inputs of batches once these are filled."""

    def _reset_static_tensors(self: Any, full_reset: bool = False) -> None:
        original(self, full_reset)
        if full_reset and self.device.type == "cuda":
            if self.config._attn_implementation in NAMES:
                torch.cuda.current_stream(self.device).synchronize()

    return _reset_static_tensors


def _is_requested(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_flash_attention_requested(
        config: Any = None,
        requested_attention_implementation: str | None = None,
        version: Any = None,
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name in NAMES or original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _is_requested_for_graphs(original: Callable[..., bool]) -> Callable[..., bool]:
    """In this module the answer decides whether CUDA graphs are on by default."""

    def is_flash_attention_requested(
        config: Any = None,
        requested_attention_implementation: str | None = None,
        version: Any = None,
    ) -> bool:
        if getattr(config, "_attn_implementation", None) not in NAMES:
            return original(config, requested_attention_implementation, version)
        return can_be_captured(config)

    return is_flash_attention_requested


def _decodes_by_table(original: Callable[..., None]) -> Callable[..., None]:
    """Decodes with a block table, on every device and with windows."""

    def ensure_decode_fast_path_is_available(
        config: Any, cb_config: Any, user_requested: bool
    ) -> None:
        if config._attn_implementation not in NAMES:
            original(config, cb_config, user_requested)

    return ensure_decode_fast_path_is_available


def can_be_captured(config: Any) -> bool:
    """Whether a CUDA graph can capture the backend that is selected for this model."""
    if not torch.cuda.is_available():
        return True  # transformers disables graphs itself
    declared = getattr(config, "dtype", None)
    # A config may declare no dtype, or another than the model was loaded with; most backends
    # support 16-bit dtypes only.
    dtypes = [torch.bfloat16, torch.float32]
    if isinstance(declared, torch.dtype) and declared != torch.float32:
        dtypes = [declared]
    for dtype in dtypes:
        heads = config.num_attention_heads
        spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
        )
        try:
            builder = get_attn_backend(spec, None, "cuda").get_builder_cls()
        except AttnlibError:
            continue
        return (
            builder.cudagraph_support is CudaGraphSupport.ALWAYS and not builder.needs_host_lengths
        )
    return False  # no backend is known, and eager steps always work


_SEAMS = (
    _Seam("continuous_api", "is_flash_attention_requested", _FLASH_CHECK, _is_requested),
    _Seam("cache", "is_flash_attention_requested", _FLASH_CHECK, _is_requested),
    _Seam("initialization", "is_flash_attention_requested", _FLASH_CHECK, _is_requested_for_graphs),
    _Seam(
        "initialization",
        "ensure_decode_fast_path_is_available",
        ("config", "cb_config", "user_requested"),
        _decodes_by_table,
    ),
    _Seam(
        "model_runner.ModelRunner",
        "compute_batch",
        ("self", "model", "batch_data"),
        _checked_step,
    ),
    _Seam(
        "input_outputs.ContinuousBatchingIOs",
        "_reset_static_tensors",
        ("self", "full_reset"),
        _filled_inputs,
    ),
)
