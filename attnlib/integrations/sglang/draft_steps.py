"""Backends of EAGLE drafts, whose steps SGLang announces together.

SGLang makes them by fixed names, and its hook registry adds attnlib's. A step is a decode of one
token per request over the committed keys and those of the steps before it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from attnlib.errors import UnsupportedConfigError

__all__ = ["DraftSteps", "open_draft_factory"]

_MAKER = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


class DraftSteps:
    """One backend for each step but the last, which only samples.

    Args:
        runner: of the draft model.
        topk: drafts of each step.
        num_steps: steps.

    Attributes:
        attn_backends: by step.
        needs_cpu_seq_lens: as of a backend.

    Raises:
        UnsupportedConfigError: trees of drafts.
    """

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        if topk != 1:
            raise UnsupportedConfigError(
                f"attnlib drafts chains, and --speculative-eagle-topk is {topk}: pass 1, or "
                "--speculative-draft-attention-backend triton"
            )
        from attnlib.integrations.sglang.backend import AttnlibAttentionBackend

        self._num_steps = num_steps
        self.attn_backends = [AttnlibAttentionBackend(runner) for _ in range(num_steps - 1)]
        self.needs_cpu_seq_lens = any(each.needs_cpu_seq_lens for each in self.attn_backends)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take the steps of a batch that runs outside of graphs."""
        for backend, batch in zip(self.attn_backends, self._steps(forward_batch), strict=True):
            backend.init_forward_metadata(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Take the steps of a batch that is captured or replayed."""
        for backend, batch in zip(self.attn_backends, self._steps(forward_batch), strict=True):
            backend.init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record the lengths and slots of the steps."""
        for backend, batch in zip(self.attn_backends, self._steps(forward_batch), strict=True):
            backend.init_forward_metadata_in_graph(batch)

    def _steps(self, batch: Any) -> list[Any]:
        """What a backend reads of each step. SGLang has the slots of a request one after another,
        one for each step."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        requests = batch.batch_size
        slots = batch.out_cache_loc[: requests * self._num_steps].view(requests, -1)
        host = batch.seq_lens_cpu
        return [
            SimpleNamespace(
                forward_mode=ForwardMode.DECODE,
                spec_info=None,
                req_pool_indices=batch.req_pool_indices[:requests],
                seq_lens=batch.seq_lens[:requests] + step + 1,
                seq_lens_cpu=None if host is None else host[:requests] + step + 1,
                out_cache_loc=slots[:, step],
            )
            for step in range(self._num_steps - 1)
        ]


def open_draft_factory(name: str) -> None:
    """Register the hook of SGLang 0.5.23.

    Args:
        name: of attnlib's backend.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def create(made: Any, factory: Any, option: str, makers: Any, *error: Any, **more: Any) -> Any:
        runner = factory.draft_model_runner

        def make() -> tuple[str, Any]:
            if more.get("stamps_children"):  # of the steps
                return name, DraftSteps(runner, factory.topk, factory.speculative_num_steps)
            from attnlib.integrations.sglang.backend import AttnlibAttentionBackend

            return name, AttnlibAttentionBackend(runner)

        return made(factory, option, {**makers, name: make}, *error, **more)

    HookRegistry.register(_MAKER, create, HookType.AROUND)
