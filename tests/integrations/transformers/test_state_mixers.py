"""Models with state layers in a `PagedModel`: ten families and more, served with attention beside
them, equal plain forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from attnlib.cache.hybrid_allocator import HybridBlockAllocator, SequenceBlocks
from attnlib.cli.demo.plain_blocks import PlainBlocks
from attnlib.cli.demo.result import check_tokens
from attnlib.cli.demo.scheduler import Request, Scheduler, most_blocks
from attnlib.cli.demo.serve import blocks_of, serve
from attnlib.errors import CacheExhaustedError, ContractError, UnsupportedConfigError
from attnlib.integrations.transformers.paged_model import PagedModel, PagedStep
from attnlib.integrations.transformers.state_mixers import SERVED
from attnlib.integrations.transformers.state_steps import norm_of
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.groups import group_batches
from tests.integrations.tiny_models import VOCABULARY, decoder, prompts

pytestmark = pytest.mark.skipif(
    not hasattr(hf.models.bamba.modeling_bamba, "mamba2_chunk_scan"),
    reason="this release of transformers has no functions that mixers call",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_INKLING: dict[str, Any] = {
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 5,
    "d_rel": 4,
    "rel_extent": 7,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "log_scaling_n_floor": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "falcon_h1": (
        "FalconH1",
        {**_MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 2, "head_dim": 16},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
        },
    ),
    "inkling_text": (
        "InklingText",
        {**_INKLING, "n_shared_experts": 1, "logits_mup_width_multiplier": 1.0},
    ),
    "inkling2_text": (
        "Inkling2Text",
        {**_INKLING, "unpadded_vocab_size": VOCABULARY, "n_layers_per_attn_res_block": 2},
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "linear_conv_kernel_dim": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_local_experts": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "expand": 2,
            "n_groups": 2,
            "num_hidden_layers": 2,
            "chunk_size": 16,
        },
    ),
    "minimax": (
        "MiniMax",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "block_size": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "hybrid_override_pattern": "M*M-",
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 16,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", _DELTA),
    "qwen3_5_text": ("Qwen3_5Text", {**_DELTA, "head_dim": 16}),
    "qwen3_next": (
        "Qwen3Next",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32, "head_dim": 16},
    ),
}
_FAST = ("inkling2_text", "inkling_text", "kimi_linear", "lfm2", "mamba2", "qwen3_next")
_MARKED = [
    name if name in _FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
]
_CONSTANT = ("inkling_text", "inkling2_text", "mamba2")
"""Those whose requests give blocks behind their windows back, or have states only."""
_BY_SWEEP = {
    "bailing_hybrid",
    "inkling2",
    "inkling_mm_model",
    "lfm2_moe",
    "lfm3",
    "qwen3_5_moe_text",
    "zamba2",
}
"""Served types whose tiny models are those of the sweep."""


def built(name: str) -> Any:
    """A model with random weights, so large that its tokens do not tie."""
    if name in _BY_SWEEP:
        from tests.integrations.transformers_sweep import tiny

        auto = hf.models.auto.modeling_auto
        names = {
            **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        }
        return tiny.build(name, names[name]).eval().float()
    prefix, sizes = FAMILIES[name]
    torch.manual_seed(0)
    common = _COMMON
    if name == "mamba2":
        common = {
            key: _COMMON[key]
            for key in ("vocab_size", "hidden_size", "tie_word_embeddings", "eos_token_id")
        }
    config = getattr(hf, prefix + "Config")(**{**common, **sizes})
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in key and "A_log" not in key:
                parameter.mul_(3.0)
            if not parameter.isfinite().all():
                parameter.copy_(torch.rand_like(parameter))
    return model.eval().float()


_NEWER = ("inkling2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_next")
"""transformers 5.17 has other configurations of them, or repeats key heads in front of the
recurrence, which is refused."""


def skip_in_older_releases(name: str) -> None:
    if not hasattr(hf, "Inkling2TextConfig") and name.startswith(_NEWER):
        pytest.skip(f"transformers {hf.__version__}: {name} needs a newer release")


def served(model: Any, backend: str = "torch", new_tokens: int = 8) -> Any:
    """Prompts of several lengths over a pool that is too small for two of them: chunks, mixed
    batches and preemptions."""
    requests = [
        Request(index, prompt, new_tokens) for index, prompt in enumerate(prompts(40, 3, 19))
    ]
    first, second, _ = blocks_needed(model, requests, backend)
    options = {"block_size": 4, "backend": backend, "hybrid": True}
    paged = PagedModel(model, num_blocks=first + second, **options)  # block 0 is no place
    scheduler = Scheduler(blocks_of(paged), 11, 3)
    result = serve(paged, scheduler, requests)
    assert scheduler.allocator.num_free_blocks == first + second - 1
    return paged, result.preemptions, check_tokens(model, requests, result.logits)


def blocks_needed(model: Any, requests: list[Request], backend: str = "torch") -> list[int]:
    """Blocks that each request needs in a pool."""
    smallest = PagedModel(model, num_blocks=2, block_size=4, backend=backend, hybrid=True)
    return [most_blocks(blocks_of(smallest), request) for request in requests]


def test_every_served_type_is_tested() -> None:
    assert set(FAMILIES) | _BY_SWEEP == SERVED


@pytest.mark.parametrize("name", _MARKED)
def test_tokens_equal_the_plain_model(name: str) -> None:
    """Chunked prefill, decodes beside prompts, and requests that start again after preemption in
    blocks that others have used (T14)."""
    skip_in_older_releases(name)
    paged, preemptions, result = served(built(name))
    assert preemptions > 0 or name in _CONSTANT
    assert result.passed and result.tokens == 24, str(result)
    assert len(paged.states.layers.by_part) >= len(paged.states.modules) > 0
    assert paged.cache_bytes == paged.pool.nbytes


@pytest.mark.parametrize("name", _MARKED)
def test_prefixes_are_reused_from_their_checkpoints(name: str) -> None:
    """T16, T17: the second request departs from the first one, behind whose common tokens it leaves
    a checkpoint; the third one starts there."""
    skip_in_older_releases(name)
    model = built(name)
    common, *tails = prompts(47, 45, 44, 43, seed=3)
    requests = [Request(index, common + tail, 4) for index, tail in enumerate(tails)]
    num_blocks = sum(blocks_needed(model, requests)) * 2
    paged = PagedModel(model, num_blocks=num_blocks, block_size=4, backend="torch", hybrid=True)
    scheduler = Scheduler(blocks_of(paged), 64, 1)
    result = check_tokens(model, requests, serve(paged, scheduler, requests).logits)
    assert result.passed and result.tokens == 12, str(result)
    sizes = [getattr(group, "block_size", 1) for group in paged.groups.values()]
    expected = 47 // max(sizes) * max(sizes) if paged.layers() else 0
    assert requests[2].num_reused == expected


def test_one_pool_serves_what_divided_memory_refuses() -> None:
    """The keys of one long request take the blocks that divided memory would keep for the states of
    others; later, others take those that it has left."""
    skip_in_older_releases("qwen3_next")
    model = built("qwen3_next")
    requests = [Request(index, prompt, 8) for index, prompt in enumerate(prompts(180, 9, 9, 9))]
    num_blocks = 1 + blocks_needed(model, requests)[0]
    paged = PagedModel(model, num_blocks=num_blocks, block_size=4, backend="torch", hybrid=True)
    keys, states = paged.groups["full"], paged.groups["states"]
    divided = Scheduler(PlainBlocks(num_blocks - 1 - 3 * states.num_layers, keys.block_size), 64, 3)
    with pytest.raises(CacheExhaustedError, match="request 0 can grow to"):
        divided.add(requests[0])
    scheduler = Scheduler(blocks_of(paged), 64, 3)
    served = serve(paged, scheduler, requests)
    result = check_tokens(model, requests, served.logits)
    assert result.passed and result.tokens == 32, str(result)
    assert served.peak_blocks == num_blocks - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(_BY_SWEEP))
def test_logits_of_other_types(name: str) -> None:
    if name.removesuffix("_text") not in hf.CONFIG_MAPPING and name not in hf.CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    skip_in_older_releases(name)
    if name == "inkling_mm_model":
        pytest.importorskip("scipy", reason="transformers plans its image encoder with scipy")
    *_, result = served(built(name))
    assert result.passed, str(result)


def step(paged: PagedModel, tokens: list[int], first: int, slot: int = 2) -> torch.Tensor:
    """Logits of tokens that continue a request from position `first`."""
    end = first + len(tokens)
    common = CommonAttentionMetadata.from_lengths(
        [len(tokens)], [end], [list(range(12))], 4, "cpu", state_slots=[slot]
    )
    with paged.attached():
        return paged.step(torch.tensor(tokens), torch.arange(first, end), common)


@pytest.mark.parametrize("name", _MARKED)
def test_drafts_are_taken_back(name: str) -> None:
    """T10: greedy decoding with drafts of which 0 to 3 are right; transformers has no assisted
    generation for these models."""
    skip_in_older_releases(name)
    model = built(name)
    (prompt,) = prompts(13, seed=5)
    paged = PagedModel(
        model, num_blocks=16, block_size=4, backend="torch", num_slots=3, max_rollback=3
    )
    with torch.no_grad():
        known = list(prompt)
        for _ in range(12):
            known.append(int(model(torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
    wanted = known[len(prompt) :]
    tokens = [int(step(paged, prompt, 0)[-1].argmax())]
    rounds = 0
    while len(tokens) < len(wanted):
        ahead = wanted[len(tokens) : len(tokens) + 3]
        drafts = [*ahead[: rounds % 4], *[(t + 7) % VOCABULARY for t in ahead[rounds % 4 :]]]
        first = len(prompt) + len(tokens) - 1
        best = step(paged, [tokens[-1], *drafts], first).argmax(-1).tolist()
        right = 0
        while right < len(drafts) and drafts[right] == best[right]:
            right += 1
        tokens += best[: right + 1]
        rounds += 1
    assert tokens[: len(wanted)] == wanted


@pytest.mark.parametrize("name", _MARKED)
def test_requests_continue_from_a_kept_prefix(name: str) -> None:
    """T12, T16: they share its blocks of keys and read its slot, which stays for later ones."""
    skip_in_older_releases(name)
    model = built(name)
    prefix, *tails = prompts(8, 5, 2, 3, seed=7)
    paged = PagedModel(model, num_blocks=16, block_size=4, backend="torch", num_slots=5)
    step(paged, prefix, 0, slot=1)
    for parts, tables, slots in (
        (tails[:2], [[0, 1, 2, 3], [0, 1, 4]], [2, 3]),
        (tails[2:], [[0, 1, 5]], [4]),
    ):
        counts, ids = [len(part) for part in parts], [token for part in parts for token in part]
        common = CommonAttentionMetadata.from_lengths(
            counts,
            [8 + n for n in counts],
            tables,
            4,
            "cpu",
            state_slots=slots,
            state_sources=[1] * len(slots),
        )
        positions = torch.cat([torch.arange(8, 8 + n) for n in counts])
        with paged.attached():
            got = paged.step(torch.tensor(ids), positions, common)
        for part, logits in zip(parts, got.split(counts), strict=True):
            with torch.no_grad():
                wanted = model(torch.tensor([[*prefix, *part]]), use_cache=False).logits[0, 8:]
            torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_next"])
def test_a_checkpoint_behind_rejected_drafts(name: str) -> None:
    """T10, T16: its slot has gone on past the checkpoint, and both requests continue from there."""
    skip_in_older_releases(name)
    model = built(name)
    options = {"block_size": 4, "backend": "torch", "hybrid": True, "max_rollback": 3}
    paged = PagedModel(model, num_blocks=40, **options)
    blocks = HybridBlockAllocator(paged.groups, 40)
    boundary = blocks.common_block_size if paged.layers() else 8  # where a prefix can end
    tokens = prompts(boundary + 4, seed=9)[0]
    one = blocks.start(tokens)

    def run(one: SequenceBlocks, ids: list[int], accepted: int) -> torch.Tensor:
        first = one.num_computed
        blocks.grow(one, first + len(ids))
        batch = group_batches(blocks, [one], [len(ids)], "cpu")
        with paged.attached():
            logits = paged.step(torch.tensor(ids), torch.arange(first, first + len(ids)), batch)
        blocks.advance(one, tokens[: first + accepted])
        return logits

    run(one, tokens[: boundary - 2], boundary - 2)
    wrong = [(token + 7) % VOCABULARY for token in tokens[boundary : boundary + 2]]
    run(one, [*tokens[boundary - 2 : boundary], *wrong], 2)
    if paged.layers():
        blocks.keep(one)
        other = blocks.start(tokens)
    else:
        other, _ = blocks.fork(one)
    assert other.num_computed == one.num_computed == boundary
    with torch.no_grad():
        wanted = model(torch.tensor([tokens]), use_cache=False).logits[0, boundary:]
    for each in (one, other):
        got = run(each, tokens[boundary:], 4)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "inkling2_text"])
def test_through_triton(name: str) -> None:
    pytest.importorskip("triton")
    skip_in_older_releases(name)
    *_, result = served(built(name), "triton", new_tokens=2)
    assert result.passed, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "kimi_linear"])
def test_decodes_are_one_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the convolution of a mixer to its norm."""
    pytest.importorskip("triton")
    skip_in_older_releases(name)
    from attnlib.ops.triton.states.fused_step import PreparedFusedStep

    run, norms = PreparedFusedStep.run, []

    def counted(self: Any, inputs: Any, *given: Any) -> None:
        norms.append(inputs.form.norm_size)
        run(self, inputs, *given)

    monkeypatch.setattr(PreparedFusedStep, "run", counted)
    model, (prompt,) = built(name), prompts(5)
    paged = PagedModel(model, num_blocks=16, block_size=4, backend="triton", num_slots=3)
    step(paged, prompt[:4], 0)
    assert not norms
    got = step(paged, prompt[4:], 4)
    assert len(norms) == len(paged.states.modules) and all(norms)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0, 4:]
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_a_norm_of_something_else_is_refused(name: str) -> None:
    """The output of a recurrence is computed by the norm that gets it."""
    skip_in_older_releases(name)
    model = built(name)
    paged = PagedModel(model, num_blocks=16, block_size=4, backend="torch")
    norm = paged.states.modules[0].norm
    handle = norm.register_forward_pre_hook(lambda module, given: (given[0].clone(), *given[1:]))
    with pytest.raises(UnsupportedConfigError, match="its norm does not read"):
        step(paged, prompts(5)[0], 0)
    handle.remove()
    assert step(paged, prompts(5)[0], 0).isfinite().all()


def test_norms_of_older_releases_gate_first() -> None:
    """Those of Mamba2, Bamba and Granite 4 had no `group_size` in transformers 5.17."""
    model = built("mamba2")
    mixer = next(m for m in model.modules() if hasattr(m, "norm") and hasattr(m, "conv1d"))
    found = norm_of(mixer)
    assert found is not None and found[1]["gate_first"]
    if hasattr(mixer.norm, "group_size"):
        del mixer.norm.group_size
    found = norm_of(mixer)
    assert found is not None and found[1]["gate_first"]
    assert found[1]["norm_size"] == mixer.norm.weight.numel()


def test_changed_channels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recurrence gets what the convolution got, as views."""
    module = hf.models.bamba.modeling_bamba
    mask = module.apply_mask_to_padding_states
    monkeypatch.setattr(
        module, "apply_mask_to_padding_states", lambda x, given: mask(x, given).clone()
    )
    paged = PagedModel(built("bamba"), num_blocks=16, block_size=4, backend="torch")
    with pytest.raises(UnsupportedConfigError, match="changes the channels"):
        step(paged, prompts(5)[0], 0)


def test_functions_are_restored_and_others_keep_theirs() -> None:
    """Within `attached`, another model of the family runs as before."""
    model, other = built("lfm2"), built("lfm2")
    module = hf.models.lfm2.modeling_lfm2
    before = module.causal_conv1d_fn
    ids = torch.tensor([prompts(9)[0]])
    with torch.no_grad():
        expected = other(ids, use_cache=False).logits
        paged = PagedModel(model, num_blocks=16, block_size=4, backend="torch")
        with paged.attached():
            assert module.causal_conv1d_fn is not before
            assert torch.equal(other(ids, use_cache=False).logits, expected)
    assert module.causal_conv1d_fn is before


def test_lightning_attention_outside_of_a_step_is_that_of_transformers() -> None:
    model = built("minimax")
    mixer = model.model.layers[0].self_attn
    hidden = torch.randn(1, 9, 64)
    with torch.no_grad():
        expected = mixer(hidden, None, None)[0]
        paged = PagedModel(model, num_blocks=16, block_size=4, backend="torch")
        with paged.attached():
            assert torch.equal(mixer(hidden, None, None)[0], expected)
            assert "forward" in vars(mixer)
    assert "forward" not in vars(mixer)


def test_a_step_needs_slots() -> None:
    paged = PagedModel(built("lfm2"), num_blocks=16, block_size=4, backend="torch")
    common = CommonAttentionMetadata.from_lengths([2], [2], [[0]], 4, "cpu")
    with pytest.raises(ContractError, match="state_slots"), paged.attached():
        paged.step(torch.tensor([3, 4]), torch.arange(2), common)


def test_generate_keeps_its_own_states() -> None:
    """Also within `attached`: only calls in a step are served."""
    model = built("bamba")
    paged = PagedModel(model, num_blocks=16, block_size=4, backend="torch")
    ids = torch.tensor([prompts(9)[0]])
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=3, do_sample=False)
        with paged.attached():
            assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)


def test_states_of_transformers_are_refused() -> None:
    model = built("mamba2")
    paged = PagedModel(model, num_blocks=16, block_size=4, backend="torch")
    x = torch.zeros(1, 2, 8, 16)
    arguments = (x, x[..., 0], x[0, 0, :, 0], x[:, :, :2], x[:, :, :2])
    with paged.states.attached(), paged.states.running(PagedStep(paged, {})):
        paged.states._enter(paged.states.modules[0], ())
        with pytest.raises(UnsupportedConfigError, match="use_cache=False"):
            hf.models.mamba2.modeling_mamba2.mamba2_chunk_scan(
                *arguments, dt_softplus=True, initial_states=x
            )


def test_other_recurrences_are_refused() -> None:
    """Mamba1 calls the same convolution, and a scan that attnlib has not."""
    model = decoder("llama")
    model.config.model_type, model.config.layer_types = "jamba", ["mamba", "full_attention"]
    with pytest.raises(UnsupportedConfigError, match="whose states are not in a paged KV cache"):
        PagedModel(model, num_blocks=4)
