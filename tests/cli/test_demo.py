"""The demo: its scheduler, its comparison, and the command on the torch and triton backends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import example_model
from attnlib.backends.torch import TorchBackend
from attnlib.cache.hybrid import KVCacheGroup, StateGroup
from attnlib.cache.hybrid_allocator import HybridBlockAllocator
from attnlib.cli import main
from attnlib.cli.demo.plain_blocks import PlainBlocks
from attnlib.cli.demo.result import compare
from attnlib.cli.demo.scheduler import Request, Scheduler
from attnlib.cli.demo.serve import ServingResult
from attnlib.cli.demo.view import Progress
from attnlib.errors import CacheExhaustedError
from attnlib.selection import unregister_backend
from attnlib.spec import AttentionSpec, StateSpec
from tests import example_checkpoint
from tests.example_checkpoint import save


def _scheduler(blocks: int = 16, size: int = 4, budget: int = 8, reqs: int = 8) -> Scheduler:
    return Scheduler(PlainBlocks(blocks, size), budget, reqs)


def _drive(scheduler: Scheduler, requests: list[Request]) -> list[list[tuple[int, int, int]]]:
    """Run to the end with a model that always samples 7.

    Returns (request, start, count) per step.
    """
    for request in requests:
        scheduler.add(request)
    steps = []
    while scheduler.is_busy:
        plan = scheduler.plan()
        assert plan, "a step without work would never end"
        steps.append([(work.request.index, work.start, work.count) for work in plan])
        for work in plan:
            scheduler.finish(work, 7 if work.samples else None)
        assert len(steps) < 500
    return steps


def test_long_prompts_come_in_chunks_and_decodes_go_first() -> None:
    steps = _drive(_scheduler(), [Request(0, [1] * 3, 4), Request(1, [2] * 9, 1)])
    assert steps[0] == [(0, 0, 3), (1, 0, 5)], "the budget of 8 cuts the second prompt"
    assert steps[1] == [(0, 3, 1), (1, 5, 4)], "the decode comes first"
    assert steps[2:] == [[(0, 4, 1)], [(0, 5, 1)]]


def test_a_common_prefix_is_computed_once() -> None:
    first, second = Request(0, [1] * 8 + [5], 2), Request(1, [1] * 8 + [6], 2)
    steps = _drive(_scheduler(budget=9), [first, second])
    assert second.num_reused == 8
    assert (1, 8, 1) in [share for step in steps for share in step]


def test_the_most_recent_request_is_preempted_and_finishes() -> None:
    scheduler = _scheduler(blocks=4, size=2, budget=16)
    old, recent = Request(0, [1, 2, 3], 5), Request(1, [4, 5, 6], 5)
    _drive(scheduler, [old, recent])
    assert scheduler.num_preemptions >= 1
    assert len(old.generated) == len(recent.generated) == 5
    assert scheduler.allocator.pool.num_used_blocks == 0


def test_a_request_that_does_not_fit_the_cache_is_an_error() -> None:
    message = "request 3 can grow to 5 blocks, the cache has 4"
    with pytest.raises(CacheExhaustedError, match=message):
        _scheduler(blocks=4, size=2).add(Request(3, [1] * 8, 3))


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 1)), min_size=1, max_size=6
    ),
    st.integers(1, 9),
    st.integers(7, 12),
    st.booleans(),
)
def test_every_token_is_computed_before_it_is_needed(
    requests: list, budget: int, blocks: int, has_states: bool
) -> None:
    """Budgets hold, all requests finish and all blocks are freed, also where the largest request
    fits the pool only if its checkpoint gives way."""
    scheduler = _scheduler(blocks=blocks, size=2, budget=budget, reqs=4)
    if has_states:
        states = StateSpec(num_heads=1, key_size=2, value_size=2, dtype=torch.float32)
        keys = AttentionSpec(
            num_heads=1, num_kv_heads=1, head_size=2, dtype=torch.float32, block_size=2
        )
        groups = {"keys": KVCacheGroup(keys), "states": StateGroup(states, 2)}
        scheduler = Scheduler(HybridBlockAllocator(groups, blocks + 3), budget, 4)
    made = [
        Request(index, [token] * length, new) for index, (length, new, token) in enumerate(requests)
    ]
    for step in _drive(scheduler, made):
        assert sum(count for _, _, count in step) <= budget and len(step) <= 4
        assert len({index for index, _, _ in step}) == len(step)
        counts = [count for _, _, count in step]
        assert counts == sorted(counts, key=lambda count: count > 1) or 1 in counts
    assert all(len(request.generated) == request.max_new_tokens for request in made)
    assert scheduler.allocator.pool.num_used_blocks == 0


def test_the_demo_on_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    assert main(["demo", "--tiny", "--device", "cpu", "--requests", "4"]) == 0
    shown = capsys.readouterr().out
    assert (
        "attnlib chose torch" in shown
        and "PASSED: 16/16 tokens identical to eager attention" in shown
        and "reused" in shown
    )


def test_the_demo_as_json_with_preemptions(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--tiny",
        "--device",
        "cpu",
        "--json",
        "--num-blocks",
        "11",
        "--block-size",
        "8",
        "--max-new-tokens",
        "20",
    ]
    assert main(["demo", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["result"]["passed"]
        and result["result"]["tokens"] == 60
        and result["preemptions"] > 0
    )
    assert result["reused_prompt_tokens"] > 0 and result["backends"] == ["torch"]


def test_a_wrong_backend_fails_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    class OneKeyTooFew(TorchBackend.get_impl_cls()):
        def forward(self, query, cache, metadata, output, lse=None):
            import dataclasses

            shorter = dataclasses.replace(
                metadata, seq_lens=metadata.seq_lens - 1, seq_lens_cpu=metadata.seq_lens_cpu - 1
            )
            super().forward(query, cache, shorter, output, lse)

    import attnlib

    wrong = type(
        "Wrong",
        (TorchBackend,),
        {
            "get_impl_cls": staticmethod(lambda: OneKeyTooFew),
            "get_name": staticmethod(lambda: "wrong"),
        },
    )
    attnlib.register_backend("wrong", wrong)
    try:
        assert main(["demo", "--tiny", "--device", "cpu", "--backend", "wrong"]) == 1
    finally:
        unregister_backend("wrong")
    assert "FAILED" in capsys.readouterr().out


def _pair(theirs: list[list[float]], ours: list[list[float]]) -> list:
    """A request whose tokens our logits chose, with both logits."""
    rows = torch.tensor(ours)
    request = Request(0, [1], len(ours), generated=rows.argmax(-1).tolist())
    return [(request, torch.tensor(theirs), rows)]


def test_the_result_for_identical_tokens() -> None:
    result = compare(_pair([[0.0, 1.0, 2.0]], [[0.0, 1.0, 2.00002]]), torch.float32)
    assert (
        result.passed
        and result.identical == 1
        and result.largest_error == pytest.approx(1e-5, rel=0.1)
    )


def test_float32_allows_no_near_tie() -> None:
    """A tie that is broken the other way fails."""
    result = compare(_pair([[0.0, 2.0, 2.00001]], [[0.0, 2.00001, 2.0]]), torch.float32)
    assert result.largest_error <= result.budget and not result.passed
    assert "request 0, token 0: 1 instead of 2, which eager attention prefers by 1.0e-05" in str(
        result
    )


def test_bfloat16_allows_near_ties_within_the_budget() -> None:
    """The limit is the stated budget (0.06 of the row maximum), not the measured error."""
    near, far = [[0.0, 1.9, 2.0]], [[0.0, 1.8, 2.0]]
    tie = compare(_pair(near, [[0.0, 2.0, 1.9]]), torch.bfloat16)
    assert (
        tie.passed
        and "0/1 tokens identical" in str(tie)
        and "; 1 tokens differ where eager attention prefers its own token by less" in str(tie)
    )
    result = compare(_pair(far, [[0.0, 1.91, 1.9]]), torch.bfloat16)
    assert result.largest_error <= result.budget and not result.passed and result.near_ties == 0


def test_logits_fail_even_where_tokens_are_equal() -> None:
    assert not compare(_pair([[0.0, 1.0, 2.0]], [[0.0, 1.5, 2.0]]), torch.bfloat16).passed
    assert not compare(_pair([[0.0, 1.0, 2.0]], [[0.0, float("-inf"), 2.0]]), torch.bfloat16).passed


def test_nan_and_an_empty_run_fail() -> None:
    """Comparisons with NaN are False, and its argmax may be the right token."""
    nan = [
        (
            Request(0, [1], 1, generated=[2]),
            torch.tensor([[0.0, 1.0, 2.0]]),
            torch.tensor([[0.0, float("nan"), 2.0]]),
        )
    ]
    result = compare(nan, torch.float32)
    assert result.identical == 1 and result.largest_error == float("inf") and not result.passed
    assert not compare([], torch.float32).passed


def test_the_demo_in_bfloat16_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tiny", "--device", "cpu", "--dtype", "bfloat16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["budget"] == 6e-2


def test_the_demo_on_a_given_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--model FOLDER`: sinks, two kinds of layers with a selection each, and its own tokenizer."""
    from tests.integrations.tiny_models import decoder

    save(decoder("gpt_oss"), tmp_path)
    assert main(["demo", "--tiny", "--device", "cpu", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "sliding_attention, full_attention\nattnlib chose torch" in shown
    assert "flash_attn" not in shown  # `attnlib explain` shows the other backends
    assert "PASSED: 12/12" in shown and "latent" not in shown


def test_the_demo_over_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P10: 24 elements per token and layer, and what four heads of 24 and 16 would need."""
    from tests.integrations.tiny_models import deepseek_v3

    save(deepseek_v3(), tmp_path)
    arguments = ["--tiny", "--device", "cpu", "--num-blocks", "256", "--model", str(tmp_path)]
    assert main(["demo", *arguments]) == 0
    shown = capsys.readouterr().out
    mib = 256 * 16 * 2 * 4 / 2**20  # of one element of all tokens of both layers
    assert f"latent cache: {24 * mib:.2f} MiB; expanded keys and values would need " in shown
    assert f"would need {4 * (24 + 16) * mib:.2f} MiB\n" in shown
    assert "full_attention over latents\nattnlib chose torch" in shown
    assert "PASSED: 12/12 tokens identical to eager attention" in shown


def test_progress_is_a_bar_on_a_terminal_and_four_lines_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(0, [1], 40)
    quiet = Progress([request])
    for count in range(1, 41):
        request.generated = [7] * count
        quiet(ServingResult(steps=count))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1] == f"[{'#' * 30}] 40/40 tokens, step 40"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    request.generated = [7] * 20
    quiet(ServingResult(steps=20))
    assert capsys.readouterr().out == f"\r[{'#' * 15}{'.' * 15}] 20/40 tokens, step 20"


def test_without_transformers_the_message_names_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert 'pip install "attnlib[transformers]"' in capsys.readouterr().err


def test_a_request_ends_with_an_end_token() -> None:
    request = Request(0, [1, 2], 9, frozenset([7]))
    assert _drive(_scheduler(), [request]) == [[(0, 0, 2)]]
    assert request.generated == [7]


def test_blocks_that_a_preempted_request_finds_again_do_not_count_as_reused() -> None:
    scheduler = _scheduler(blocks=4, size=2, budget=16)
    requests = [Request(0, [1, 2, 3], 5), Request(1, [4, 5, 6], 5)]
    _drive(scheduler, requests)
    assert requests[1].was_preempted and requests[1].num_reused == 0


def test_the_example_model_writes_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The default with the extra: terms, text of every prompt, checks per request, preemption."""
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    converted = example_checkpoint.install(monkeypatch, tmp_path)
    assert main(["demo", "--device", "cpu", "--block-size", "32"]) == 0
    shown, hints = capsys.readouterr()
    assert "Gemma 3 270M (terms of use: https://ai.google.dev/gemma/terms), float32 on" in shown
    assert "first use of Gemma 3 270M" in hints and "no language model" not in hints
    rows = re.findall(r"^ {1,2}(\d+)  .* (\d+) +(\d+) +(\d+)/(\d+)$", shown, re.M)
    assert [int(row[0]) for row in rows] == list(range(12))
    lengths, reused, equal, generated = (
        [int(row[column]) for row in rows] for column in (1, 2, 3, 4)
    )
    assert len(set(lengths)) > 8 and max(reused) > 0 and equal == generated
    assert shown.count("     -> ") == 12
    assert re.search(r"preemptions: [1-9]", shown)
    assert main(["demo", "--device", "cpu", "--requests", "2"]) == 0
    assert len(converted) == 1, "the second run loads the converted model"


def test_an_answer_of_one_line_ends_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model writes one letter and a line break again and again."""
    import transformers

    from tests.example_checkpoint import LETTERS

    config = transformers.LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=len(LETTERS) + 2, head_dim=8, num_attention_heads=1,
        num_key_value_heads=1, num_hidden_layers=1, intermediate_size=8, tie_word_embeddings=False,
        eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(*model.model.embed_tokens.weight.shape))
        model.lm_head.weight[LETTERS.index("a")].fill_(1)  # "a" after any letter but itself
        model.lm_head.weight[LETTERS.index("\n"), LETTERS.index("a")] = 2
    save(model, tmp_path)
    assert main(["demo", "--device", "cpu", "--model", str(tmp_path), "--json"]) == 0
    texts = list(json.loads(capsys.readouterr().out)["texts"].values())
    assert texts[0] == "a\n" and texts[1] == "a\n" * 12


def test_seeded_is_the_small_decoder_also_where_a_model_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    converted = example_checkpoint.install(monkeypatch, tmp_path)
    arguments = ["--device", "cpu", "--model", "seeded", "--max-new-tokens", "2", "--requests", "2"]
    assert main(["demo", *arguments]) == 0
    assert "small decoder, 4 layers" in capsys.readouterr().out and not converted


def test_without_the_extra_the_demo_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints no text of random weights."""
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    example_checkpoint.uninstall(monkeypatch)
    assert main(["demo", "--device", "cpu"]) == 0
    shown, hints = capsys.readouterr()
    assert hints.count("\n") == 1 and 'pip install "attnlib[model]"' in hints
    assert "PASSED: 288/288" in shown and re.search(r"preemptions: [1-9]", shown)
    assert " -> tokens " in shown and "     -> " not in shown


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_folder_without_a_tokenizer_is_refused_in_one_line(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """For Gemma transformers makes a tokenizer with special tokens only."""
    from tests.integrations.tiny_models import decoder

    decoder(kind).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["demo", "--device", "cpu", "--model", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and f"--model {tmp_path}: " in message
    assert "cannot load its tokenizer" in message


@pytest.mark.slow
@pytest.mark.skipif(not example_model.is_installed(), reason=example_model.INSTALL)
def test_the_demo_on_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["result"]["passed"] and result["result"]["near_ties"] == 0
    texts = [result["texts"][str(index)] for index in range(12)]
    assert texts[0].strip() == "Paris" and texts[2].strip() == "Iron"
    assert texts[4].strip() == "livre" and "man" in texts[1]
    assert result["preemptions"] > 0 and result["reused_prompt_tokens"] > 0


@pytest.mark.slow
def test_the_demo_under_the_interpreter() -> None:
    """`ATTNLIB_BACKEND=triton attnlib demo --tiny` on a machine without a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "attnlib",
            "demo",
            "--tiny",
            "--device",
            "cpu",
            "--requests",
            "2",
            "--max-new-tokens",
            "2",
        ],
        capture_output=True,
        text=True,
        env={**environment, "ATTNLIB_BACKEND": "triton"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "TRITON_INTERPRET=1" in done.stderr
        and "tokens/s on triton" in done.stdout
        and "PASSED: 4/4" in done.stdout
    )


def test_invalid_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["demo", "--dtype", "float12"]) == 2
        and "argument --dtype: float12 is not a torch dtype" in capsys.readouterr().err
    )
    assert main(["demo", "--tiny", "--device", "cpu", "--num-blocks", "2"]) == 2
    assert "can grow to" in capsys.readouterr().err
    assert (
        main(["demo", "--device", "sm_90"]) == 2
        and "argument --device: sm_90 is not available" in capsys.readouterr().err
    )
    assert (
        main(["demo", "--device", "cpu", "--model", "no/such/folder"]) == 2
        and "--model no/such/folder: transf" in capsys.readouterr().err
    )
    assert main(["demo", "--requests", "0"]) == 2
    assert "argument --requests: 0 is below 1" in capsys.readouterr().err


def test_the_demo_without_a_tokenizer_prints_token_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: the bytes of random weights are no text."""
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    assert main(["demo", "--tiny", "--device", "cpu", "--requests", "1"]) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("  request 0:"))
    assert re.fullmatch(r".* -> tokens( \d+){4}", line)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_demo_on_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton by name, in bfloat16."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    assert main(["demo", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["backends"] == ["triton"] and result["warmup_seconds"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_demo_with_automatic_selection_on_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "bfloat16 on cuda" in shown and "[auto; " in shown and "PASSED" in shown
