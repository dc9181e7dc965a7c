"""vLLM's engine on a CPU without any compiled operation of vLLM.

The Python files of vLLM's CUDA wheel run on a platform of their own ("cpu", but out of tree), whose
layers take their plain torch path. Two C++ operations of vLLM's CPU runner are defined in Python.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
import vllm_cpu_experts

_KEPT: list[torch.library.Library] = []


_IMAGES = "transformers.models.gemma3.image_processing_gemma3"


class _ByPil(ModuleType):
    """A module of transformers that needs torchvision, whose class vLLM names in annotations."""

    def __getattr__(self, name: str) -> Any:
        if name != "Gemma3ImageProcessor":
            raise AttributeError(name)
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil


def platform() -> str | None:
    """Entry point of `vllm.platform_plugins`."""
    used = os.environ.get("TEST_VLLM_CPU") == "1"
    if used:
        sys.modules.setdefault(_IMAGES, _ByPil(_IMAGES))
    return "vllm_cpu_platform_class.TestCpuPlatform" if used else None


def define_operations() -> None:
    """The C++ operations that the CPU runner calls for a plain decoder."""
    if _KEPT:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in (
        ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
        (
            "compute_slot_mapping_kernel_impl(Tensor a, Tensor b, Tensor c, Tensor(a!) d, int e)"
            " -> ()",
            compute_slots,
        ),
        (
            "rejection_greedy_sample_kernel_impl(Tensor(a!) a, Tensor b, Tensor c, Tensor d, Tensor"
            " e, Tensor? f, int g) -> ()",
            accept_greedy_drafts,
        ),
        (
            "rejection_random_sample_kernel_impl(Tensor(a!) a, Tensor b, Tensor c, Tensor? d,"
            " Tensor e, Tensor f, Tensor g, Tensor h, Tensor? i, int j, int k, bool l) -> ()",
            sample_nothing,
        ),
        (
            "sample_recovered_tokens_kernel_impl(Tensor(a!) a, Tensor b, Tensor c, Tensor? d,"
            " Tensor e, Tensor f, int g, bool h) -> ()",
            sample_nothing,
        ),
        ("rms_norm(Tensor(a!) out, Tensor x, Tensor? weight, float eps) -> ()", norm),
        (
            "rotary_embedding(Tensor a, Tensor(a!) b, Tensor? c, int d, Tensor e, bool f) -> ()",
            rotate,
        ),
        ("expand_kernel_impl(Tensor(a!) a, Tensor b, Tensor c, int d, int e) -> ()", expand),
    ):
        name = schema.split("(")[0]
        if not hasattr(torch.ops._C, name):
            library.define(schema)
            library.impl(name, function, "CompositeExplicitAutograd")
    _KEPT.append(library)  # its definitions are removed with it


def compute_slots(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """slot = block * block_size + offset; -1 behind the batch."""
    tokens = int(query_start_loc[-1])
    lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
    request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = positions[:tokens].long()
    blocks = block_table[request, position // block_size].long()
    slot_mapping.fill_(-1)
    slot_mapping[:tokens] = blocks * block_size + position % block_size


def accept_greedy_drafts(
    output: torch.Tensor,
    ends: torch.Tensor,
    drafted: torch.Tensor,
    best: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    longest: int,
) -> None:
    """The best tokens of each greedy request up to the first that was not drafted; the bonus token
    behind them where all were."""
    start = 0
    for request, end in enumerate(ends.tolist()):
        if is_greedy is None or bool(is_greedy[request]):
            same = (drafted[start:end] == best[start:end]).long()
            accepted = int(same.cumprod(0).sum())
            kept = min(accepted + 1, end - start)
            output[request, :kept] = best[start : start + kept]
            if accepted == end - start:
                output[request, accepted] = bonus.flatten()[request]
        start = end


def sample_nothing(*arguments: Any) -> None:
    """Random sampling of drafts: only vLLM's profiling run calls it here, and reads no result."""


def expand(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, old: int, new: int
) -> None:
    """The value of each request for each of its tokens, `new` instead of `old`."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = torch.where(values == old, new, values)
    output.copy_(torch.repeat_interleave(values, counts))


def norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """The root mean square of each row is 1, times `weight`, also of several layers."""
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        weight = weight.view(*weight.shape[:-1], *[1] * (x.dim() - weight.dim()), -1)
        scaled = scaled * weight
    out.copy_(scaled)


def rotate(
    positions: torch.Tensor, heads: torch.Tensor, _: Any, size: int, table: torch.Tensor, neox: bool
) -> None:
    """Rotary embedding of halves, in place."""
    assert neox
    view = heads.view(heads.shape[0], -1, size)
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    a, b = view[..., : cos.shape[-1]].clone(), view[..., cos.shape[-1] : 2 * cos.shape[-1]].clone()
    view[..., : cos.shape[-1]] = a * cos - b * sin
    view[..., cos.shape[-1] : 2 * cos.shape[-1]] = b * cos + a * sin


def distributed_slots(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: torch.Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    **_: Any,
) -> None:
    """`compute_slots` where each rank of a group stores its share of the tokens, -1 for others."""
    tokens = int(query_start_loc[-1])
    lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
    request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = positions[:tokens].long()
    ranks, run = TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE
    blocks = block_table[request, position // (block_size * ranks)].long()
    within = position % (block_size * ranks)
    local = within // (run * ranks) * run + within % run
    mine = within // run % ranks == TOTAL_CP_RANK
    slot_mapping.fill_(-1)
    slot_mapping[:tokens] = torch.where(mine, blocks * block_size + local, -1)


def combine_ranks(
    out: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool = False
) -> Any:
    """vLLM's `cp_lse_ag_out_rs`, a Triton kernel, by its formula."""
    shape = (group.world_size, *lse.shape)
    lses = group.all_gather(lse.contiguous(), dim=0).view(shape)
    outs = group.all_gather(out.contiguous(), dim=0).view(*shape, out.shape[-1])
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - total.masked_fill(total == -torch.inf, 0.0)).unsqueeze(-1)
    heads = lse.shape[1] // group.world_size
    own = slice(heads * group.rank_in_group, heads * (group.rank_in_group + 1))
    combined = (outs * weights).sum(0)[:, own]
    return (combined, total[:, own]) if return_lse else combined


def inspect_models_here() -> None:
    """Let vLLM import the class of a model in this process, not in another one first: it does so to
    keep CUDA uninitialized, and most of the time of a small engine goes there."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def worker_class() -> Any:
    """vLLM's CPU worker; the size of its cache is what the user says."""
    define_operations()
    inspect_models_here()
    import vllm.model_executor.layers.attention.mla_attention as latent_layers
    import vllm.utils.cpu_triton_utils as kernels
    import vllm.v1.attention.ops.common as operations
    from vllm.v1.worker.cpu_worker import CPUWorker

    vllm_cpu_experts.register()
    if hasattr(operations, "cp_lse_ag_out_rs"):  # vLLM 0.26
        import vllm.v1.sample.ops.topk_topp_sampler as samplers
        import vllm.v1.worker.cpu.buffer_utils as buffers
        import vllm.v1.worker.utils as caches
        from vllm.platforms.cpu import CpuPlatform

        # Layers with two caches, for cross-attention, are known to work on vLLM's own platforms.
        caches.current_platform = CpuPlatform()
        samplers.HAS_TRITON = False  # its kernel cannot be interpreted

        buffers.is_uva_available = lambda: True  # vLLM says so for its own CPU platform
        operations.cp_lse_ag_out_rs = combine_ranks
        kernels.compute_slot_mapping_kernel = kernels._FuncWrapper(distributed_slots)

    # vLLM's own prefills over latents need FlashAttention. attnlib does not call them.
    latent_layers.get_mla_prefill_backend = lambda config: latent_layers.MLAPrefillBackend
    latent_layers.MLAPrefillBackend.__abstractmethods__ = frozenset()

    class TestCpuWorker(CPUWorker):
        def _maybe_get_memory_pool_context(self, tag: str) -> Any:
            return nullcontext()

        def compile_or_warm_up_model(self) -> Any:
            """Also what the GPU worker of 0.33 does first: compile the kernels of the registry. Of
            these, vLLM's own need a GPU."""
            registry = getattr(self.model_runner, "jit_warmup_registry", None)
            if registry is not None and self.vllm_config.kernel_config.enable_jit_warmup:
                kernels = registry._registrations
                for kernel in [k for k in kernels if not type(k).__module__.startswith("attnlib")]:
                    del kernels[kernel]
                registry.warmup()
            return super().compile_or_warm_up_model()

    return TestCpuWorker
