"""The builder of an adapted backend: vLLM's v1 builder behind attnlib's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attnlib.compat.vllm.config import config_of
from attnlib.compat.vllm.runner import AttentionMetadataBuilder as RunnerBuilder
from attnlib.errors import RegistrationError
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata, paged_fields
from attnlib.metadata.paged_builder import PagedMetadataBuilder
from attnlib.spec import AttentionSpec, CudaGraphSupport

__all__ = ["AdaptedBuilder", "AdaptedMetadata", "builder_of"]


@dataclass(kw_only=True)
class AdaptedMetadata(PagedMetadata):
    """The batch, for attnlib, and what a builder built that is no `attnlib.AttentionMetadata`.

    Attributes:
        built: for the impl.
    """

    built: Any


class AdaptedBuilder(AttentionMetadataBuilder[Any]):
    """Builds with the builder of an adapted backend; arguments as of its base class."""

    inner_cls: ClassVar[Any]

    def __init__(self, spec: AttentionSpec, device: Any = None, **kwargs: Any) -> None:
        super().__init__(spec, device, **kwargs)
        if issubclass(self.inner_cls, AttentionMetadataBuilder):
            self.inner = self.inner_cls.create(spec, device, **kwargs)
        else:
            self.inner = self.inner_cls(spec, config_of(spec, self.limits), self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionMetadata:
        """What the builder builds, in an `AdaptedMetadata` if attnlib cannot read it."""
        built = self.inner.build(
            common_prefix_len=common_prefix_len,
            common_attn_metadata=common_attn_metadata,
            fast_build=fast_build,
        )
        return self._readable(built, common_attn_metadata)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionMetadata:
        """See `build`."""
        built = self.inner.build_for_cudagraph_capture(common_attn_metadata)
        return self._readable(built, common_attn_metadata)

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """As the builder does."""
        return bool(self.inner.reorder_batch(input_batch, scheduler_output))

    def _readable(self, built: Any, common: CommonAttentionMetadata) -> AttentionMetadata:
        if isinstance(built, AttentionMetadata):
            return built
        fields = paged_fields(common, self.spec, None, needs_host_lengths=self.needs_host_lengths)
        return AdaptedMetadata(**fields, built=built)


def builder_of(backend: Any) -> dict[str, Any]:
    """The attributes of the `AdaptedBuilder` of a backend.

    Raises:
        RegistrationError: its builder is one of vLLM v0.
    """
    try:
        found: Any = backend.get_builder_cls()
    except (AttributeError, NotImplementedError):
        found = PagedMetadataBuilder
    if issubclass(found, RunnerBuilder):
        raise RegistrationError(
            f"{found.__name__} builds the batches of a v0 runner, and layers of attnlib take those "
            "of CommonAttentionMetadata: give the backend a v1 builder, or run it in "
            "attnlib.compat.vllm.Attention"
        )
    captures = bool(getattr(found, "full_cudagraph_supported", False))
    support = CudaGraphSupport.ALWAYS if captures else CudaGraphSupport.NEVER
    return {
        "inner_cls": found,
        "cudagraph_support": getattr(found, "cudagraph_support", support),
        "needs_host_lengths": getattr(found, "needs_host_lengths", True),
        "reorder_batch_threshold": getattr(found, "reorder_batch_threshold", None),
        "__module__": __name__,
    }
