"""The platform of `vllm_cpu_platform`; imported by vLLM while it starts."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum
from vllm_cpu_platform import define_operations


class TestCpuPlatform(CpuPlatform):
    """A CPU with nothing but torch."""

    _enum = PlatformEnum.OOT

    @classmethod
    def import_kernels(cls) -> None:
        define_operations()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The selected backend or an error with its reasons, as on vLLM's CUDA platform."""
        backend = selected_backend.get_class()
        reasons = backend.validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(
                f"Selected backend {backend.get_name()} is not valid for this configuration. "
                f"Reason: {reasons}"
            )
        return f"{backend.__module__}.{backend.__qualname__}"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """The block size that the user names is kept, and 16 is the default. Prefills stay in
        chunks, which vLLM's CPU platform does not do for latent attention, and scheduling stays
        asynchronous where it would be on a GPU."""
        cache = vllm_config.cache_config
        named = cache.block_size if cache.user_specified_block_size else None
        scheduler = vllm_config.scheduler_config
        chunks = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        is_async = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunks
        scheduler.async_scheduling = is_async
        cache.block_size = named or 16
        vllm_config.parallel_config.worker_cls = "vllm_cpu_worker.TestCpuWorker"
