"""The adapter inside an importable vLLM, without an engine; run by `test_vllm_adapter.py`.

Batches are vLLM's own `CommonAttentionMetadata`. The reference is torch's attention over the keys
that the cache holds.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm import context_parallel, register
from attnlib.integrations.vllm.backend import AttnlibBackend
from attnlib.integrations.vllm.builder import AttnlibMetadataBuilder
from attnlib.integrations.vllm.format_names import stored_fields, takes_names
from attnlib.integrations.vllm.impl import AttnlibImpl
from attnlib.integrations.vllm.names import backend_name
from attnlib.parallel.group import RankGroup

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 32, 16, 40


@pytest.fixture(autouse=True)
def _config() -> Any:
    with set_current_vllm_config(VllmConfig()):
        torch.set_default_dtype(torch.float32)
        yield


def vllm_batch(
    starts: torch.Tensor, lengths: torch.Tensor, tokens: int, query_len: int, seq_len: int,
    table: torch.Tensor, slots: torch.Tensor, **fields: Any,
) -> CommonAttentionMetadata:  # fmt: skip
    """vLLM's batch; `query_len` and `seq_len` are bounds."""
    fields.setdefault("causal", True)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths,
        num_reqs=len(lengths), num_actual_tokens=tokens, max_query_len=query_len,
        max_seq_len=seq_len, block_table_tensor=table, slot_mapping=slots,
        seq_lens_cpu_upper_bound=lengths, **fields,
    )  # fmt: skip


class Layer:
    """One layer with its cache and builder, over vLLM's packed memory in NHD order. `model` are
    attributes of vLLM's configuration of the model."""

    def __init__(
        self, kv_cache_dtype: str = "auto", model: dict[str, Any] | None = None,
        non_causal: bool = False, clamped: bool = False, **arguments: Any,
    ) -> None:  # fmt: skip
        self.impl = AttnlibImpl(
            HEADS, SIZE, SIZE**-0.5, KV_HEADS, kv_cache_dtype=kv_cache_dtype, **arguments
        )
        dtype = torch.float32 if kv_cache_dtype == "auto" else torch.uint8
        memory = torch.zeros(BLOCKS, BLOCK, KV_HEADS, 2 * SIZE, dtype=dtype)
        self.kv_cache = memory.permute(0, 2, 1, 3)
        self.layer = SimpleNamespace(
            impl=self.impl, layer_name="layer",
            kv_cache=self.kv_cache, mm_prefix_clamp_sliding_window=clamped,
            _k_scale=torch.tensor([0.5]), _v_scale=torch.tensor([0.25]),
        )  # fmt: skip
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context={"layer": self.layer},
                cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
            model_config=SimpleNamespace(max_model_len=512, enforce_eager=True, **(model or {})),
            attention_config=SimpleNamespace(use_non_causal=non_causal),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            speculative_config=None,
        )
        self.config, self.writes = config, "kv_sharing_target_layer_name" not in arguments
        spec = SimpleNamespace(block_size=BLOCK)
        self.builder = AttnlibMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))

    def step(
        self, query_lens: list[int], seq_lens: list[int], padded: tuple[int, int] | None = None,
        **fields: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Run a batch; `padded` requests and tokens as in a CUDA graph, `fields` of vLLM's batch.
        Returns q, k, v, output."""
        requests, tokens = len(query_lens), sum(query_lens)
        rows, columns = padded or (requests, tokens)
        starts = torch.full((rows + 1,), tokens, dtype=torch.int32)
        starts[: requests + 1] = torch.tensor([0, *query_lens]).cumsum(0)
        lengths = torch.zeros(rows, dtype=torch.int32)
        lengths[:requests] = torch.tensor(seq_lens)
        table = torch.zeros(rows, 10, dtype=torch.int32)  # 0 is vLLM's null block
        slots = torch.full((columns,), -1)
        for request, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
            table[request] = torch.arange(10) + 1 + 10 * request
            position = torch.arange(total - new, total)
            first = starts[request]
            slots[first : first + new] = (
                table[request][position // BLOCK] * BLOCK + position % BLOCK
            )
        sizes = columns, max(query_lens), max(seq_lens)
        batch = vllm_batch(starts, lengths, *sizes, table, slots, **fields)
        untouched = slots.clone()
        q, k, v = (torch.randn(columns, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        output = torch.full((columns, HEADS, SIZE), 7.0)
        metadata = self.builder.build(0, batch)
        if self.writes:
            self.impl.do_kv_cache_update(self.layer, k, v, self.kv_cache, slots)
        self.impl.forward(self.layer, q, k, v, self.kv_cache, metadata, output)
        assert torch.equal(slots, untouched)
        self.table, self.metadata = table, metadata
        return q, k, v, output

    def expected(
        self, q: torch.Tensor, query_lens: list[int], seq_lens: list[int],
        window: int | None = None, visible: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention to the keys of the cache; `visible(request, p, k)` replaces the mask."""
        memory = self.kv_cache.permute(0, 2, 1, 3)
        if memory.dtype == torch.uint8:
            stored = memory.view(torch.float8_e4m3fn).float()
            scales = (scale.view(-1, 1) for scale in (self.layer._k_scale, self.layer._v_scale))
            parts = stored[..., :SIZE], stored[..., SIZE:]
            memory = torch.cat([p * scale for p, scale in zip(parts, scales, strict=True)], -1)
        rows, start = [], 0
        for request, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
            position = torch.arange(total)
            blocks = self.table[request].long()
            held = memory[blocks[position // BLOCK], position % BLOCK]
            at, keys = position[total - new :, None], position[None]
            seen = keys <= at if visible is None else visible(request, at, keys)
            if window is not None:
                seen = seen & (keys > at - window)
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[start : start + new].transpose(0, 1), held[..., :SIZE].transpose(0, 1),
                held[..., SIZE:].transpose(0, 1), attn_mask=seen, enable_gqa=True,
            )  # fmt: skip
            rows.append(attended.transpose(0, 1))
            start += new
        return torch.cat(rows)


STEPS = [([40, 9], [40, 9]), ([1, 1], [41, 10]), ([4, 4], [45, 14]), ([1, 20], [46, 34])]
"""Prefill, decodes, several tokens per request (speculation), a mixed batch."""


@pytest.mark.parametrize("window", [None, 11])
def test_steps(window: int | None) -> None:
    layer = Layer(sliding_window=window)
    for query_lens, seq_lens in STEPS:
        q, _, _, output = layer.step(query_lens, seq_lens)
        torch.testing.assert_close(output, layer.expected(q, query_lens, seq_lens, window))


def test_drafts_with_a_cache_of_their_own_beside_a_divided_one() -> None:
    """vLLM makes their layers as if no keys were divided; only the configuration says so."""
    layer = Layer()
    layer.config.parallel_config.decode_context_parallel_size = 2
    spec = SimpleNamespace(block_size=BLOCK, dcp_sharded=False)
    layer.builder = type(layer.builder)(spec, ["layer"], layer.config, torch.device("cpu"))
    assert layer.builder.distributed is None
    for query_lens, seq_lens in STEPS:
        q, _, _, output = layer.step(query_lens, seq_lens)
        torch.testing.assert_close(output, layer.expected(q, query_lens, seq_lens))


def test_padded_batch() -> None:
    """Padding rows have no tokens and length 0, padding tokens have slot -1: nothing is written,
    and their output is 0."""
    layer = Layer()
    layer.step([30, 9], [30, 9])
    held = layer.kv_cache.clone()
    q, k, _, output = layer.step([1, 1], [31, 10], padded=(5, 8))
    torch.testing.assert_close(output[:2], layer.expected(q, [1, 1], [31, 10]))
    assert not output[2:].any()
    changed = (layer.kv_cache != held).any(-1).any(1)
    assert changed.sum() == 2


@pytest.mark.parametrize(
    ("mode", "longest"), [(CUDAGraphMode.FULL, 16), (CUDAGraphMode.FULL_DECODE_ONLY, 2)]
)
def test_bound_of_captured_queries(mode: Any, longest: int) -> None:
    """The second model runner captures 16 tokens as 8 requests of 2. Where mixed batches replay the
    graph, one request may have all tokens."""
    layer = Layer()
    layer.config.compilation_config.cudagraph_mode = mode
    starts = torch.arange(0, 17, 2, dtype=torch.int32)
    lengths, table = torch.full((8,), 2, dtype=torch.int32), torch.zeros(8, 10, dtype=torch.int32)
    batch = vllm_batch(starts, lengths, 16, 2, 512, table, torch.full((16,), -1))
    (captured,) = layer.builder.build_for_cudagraph_capture(batch).batches.values()
    assert captured.max_query_len == longest


def test_fp8_cache_with_scales_per_tensor() -> None:
    layer = Layer("fp8")
    for query_lens, seq_lens in STEPS:
        q, _, _, output = layer.step(query_lens, seq_lens)
        torch.testing.assert_close(output, layer.expected(q, query_lens, seq_lens))
    assert layer.kv_cache.any()


def test_a_layer_that_shares_a_cache_does_not_write() -> None:
    writer = Layer()
    writer.step([30, 9], [30, 9])
    reader = Layer(kv_sharing_target_layer_name="other")
    reader.kv_cache = writer.kv_cache
    held = writer.kv_cache.clone()
    q, _, _, output = reader.step([1, 1], [30, 9])
    assert torch.equal(writer.kv_cache, held)
    torch.testing.assert_close(output, reader.expected(q, [1, 1], [30, 9]))


def test_sinks_and_soft_cap() -> None:
    """Against the same adapter without them: a very low sink and a very high cap change nothing."""
    torch.manual_seed(0)
    plain = Layer()
    q = plain.step([20, 9], [20, 9])[0]
    torch.manual_seed(0)
    same = Layer(sinks=torch.full((HEADS,), -1e9), logits_soft_cap=8000.0)
    near = same.step([20, 9], [20, 9])
    torch.testing.assert_close(near[3], plain.expected(q, [20, 9], [20, 9]), atol=1e-4, rtol=1e-4)
    torch.manual_seed(0)
    other = Layer(sinks=torch.zeros(HEADS)).step([20, 9], [20, 9])[3]
    assert not torch.allclose(other, near[3], atol=1e-2)


def test_alibi() -> None:
    """Slopes of 0 change nothing; others prefer near keys, so that position decides."""
    outputs = []
    for slope in (0.0, 50.0):
        torch.manual_seed(0)
        layer = Layer(alibi_slopes=[slope] * HEADS)
        q, _, v, output = layer.step([20, 9], [20, 9])
        outputs.append(output)
    torch.testing.assert_close(outputs[0], layer.expected(q, [20, 9], [20, 9]))
    own = v.repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close(outputs[1], own, atol=1e-4, rtol=1e-4)


def test_a_profiling_run_gives_zeros() -> None:
    layer = Layer()
    output = torch.ones(3, HEADS, SIZE)
    empty = torch.tensor([])
    layer.impl.do_kv_cache_update(layer.layer, output, output, empty, torch.zeros(3).long())
    layer.impl.forward(layer.layer, output, None, None, empty, None, output)
    assert not output.any()


def test_metadata_has_no_slots() -> None:
    """vLLM passes the slots to `do_kv_cache_update`, and plans to drop them from its batches."""
    layer = Layer()
    starts, lengths = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    table = torch.ones(1, 10, dtype=torch.int32)
    batch = vllm_batch(starts, lengths, 9, 9, 9, table, torch.zeros(9).long())
    del batch.slot_mapping
    (made,) = layer.builder.build(0, batch).batches.values()
    assert made.slot_mapping is None


def test_an_encoder_has_nothing_to_write() -> None:
    layer = Layer(attn_type="encoder_only")
    rows = torch.ones(3, KV_HEADS, SIZE)
    layer.impl.do_kv_cache_update(layer.layer, rows, rows, layer.kv_cache, torch.arange(3))
    assert not layer.kv_cache.any()


def ask(**changes: Any) -> list[str]:
    """The reasons for a configuration that is supported but for the changes. `backend` is one for
    caches of its own name."""
    backend = changes.pop("backend", AttnlibBackend)
    stored = getattr(backend, "stored_name", "auto")
    question = dict(
        head_size=64, dtype=torch.float32, kv_cache_dtype=stored, block_size=None, use_mla=False,
        has_sink=False, use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False,
        device_capability=None, attn_type="decoder",
    )  # fmt: skip
    found: list[str] = backend.validate_configuration(**{**question, **changes})
    return found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype not supported"),
        ({"block_size": 24}, "block_size not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_one_refusal_of_each_kind(changes: dict[str, Any], reason: str) -> None:
    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    if not changes.keys() <= known.keys():
        pytest.skip("this release of vLLM does not ask")
    assert any(reason in found for found in ask(**changes)), ask(**changes)


def test_several_reasons_at_once() -> None:
    assert len(ask(use_mla=True, use_sparse=True, use_pcp=True)) == 3


def test_supported_configurations_have_no_reasons() -> None:
    assert ask() == []
    assert ask(has_sink=True, has_sliding_window=True, use_batch_invariant=True) == []
    assert ask(attn_type="encoder_only") == []
    assert ask(kv_cache_dtype="fp8") == []
    assert ask(use_mm_prefix=True, has_sliding_window=True) == []
    assert ask(kv_cache_dtype="fp8", use_per_head_quant_scales=True) == []
    assert ask(attn_type="encoder_decoder") == []
    assert AttnlibBackend.supports_dcp()


def test_reasons_of_attnlib_name_backend_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (reason,) = ask(head_size=1024)
    assert reason.startswith("attnlib: triton: ")
    assert ask(use_batch_invariant=True) == []


def test_vllms_own_cpu_platform_serves_what_the_user_names() -> None:
    """It takes its own backend whatever the user names, so attnlib is registered for that one."""
    register()
    question = AttentionSelectorConfig(
        head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=None
    )
    own = "CPUAttentionBackend"
    for name, expected in ((None, own), ("FLASH_ATTN", own), (backend_name(), "AttnlibBackend")):
        config = VllmConfig()
        config.attention_config.backend = name and AttentionBackendEnum[name]
        with set_current_vllm_config(config):
            path = CpuPlatform.get_attn_backend_cls(config.attention_config.backend, question)
            assert resolve_obj_by_qualname(path).__name__ == expected


def test_arguments_without_implementation_are_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match="q_pad_num_heads"):
        Layer(q_pad_num_heads=4)


def test_encoders_with_a_causal_batch_are_refused() -> None:
    layer = Layer(attn_type="encoder_only")
    with pytest.raises(UnsupportedConfigError, match="causal=True"):
        layer.builder.build(0, SimpleNamespace(causal=True, num_actual_tokens=1))


def test_scaled_output_is_refused() -> None:
    layer, one = Layer(), torch.ones(1)
    output = torch.ones(1, HEADS, SIZE)
    with pytest.raises(UnsupportedConfigError, match="fuse_attn_quant"):
        layer.impl.forward(layer.layer, output, None, None, one, None, output, output_scale=one)


@pytest.mark.parametrize(
    "arguments",
    [{"kv_sharing_target_layer_name": "other"}, {"attn_type": "encoder_only"},
     {"alibi_slopes": [1.0] * HEADS, "use_alibi_sqrt": True}],
    ids=lambda arguments: next(iter(arguments)),
)  # fmt: skip
def test_layers_that_cannot_be_distributed_are_refused(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_ranks(cls: Any, *args: Any, **kwargs: Any) -> Any:
        impl = object.__new__(cls)
        impl.dcp_world_size, impl.dcp_rank = 2, 0
        return impl

    group = SimpleNamespace(world_size=2, rank=0, check_device=lambda device: None)
    group.agreed = functools.partial(RankGroup.agreed, group)
    monkeypatch.setattr(context_parallel, "rank_group", lambda: group)
    monkeypatch.setattr(AttnlibImpl, "__new__", two_ranks)
    with pytest.raises(UnsupportedConfigError, match="decode context parallelism"):
        Layer(**arguments)


@pytest.mark.parametrize(
    ("more", "stored", "connector", "reason"),
    [
        ({"rotation": "hadamard"}, "nvfp4", None, "rotation is not known: kv_rotation is the only"),
        ({"kv_rotation": "hadamard"}, "fp8", None, "use int8_per_token_head, fp8_per_token_head"),
        ({"kv_rotation": "hadamard"}, "nvfp4", object(), "connectors do not compare it"),
    ],
)
def test_refused_rotations(more: Any, stored: str, connector: Any, reason: str) -> None:
    config = SimpleNamespace(
        additional_config={"attnlib": more}, kv_transfer_config=connector,
        cache_config=SimpleNamespace(cache_dtype=stored),
    )  # fmt: skip
    if takes_names() and "kv_rotation" in more:
        reason = "use --kv-cache-dtype FORMAT"
    with pytest.raises(UnsupportedConfigError, match=reason):
        stored_fields(stored, config)
    assert stored_fields("int8_per_token_head")["kv_rotation"] is None
