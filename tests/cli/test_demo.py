"""The demo: its scheduler, its verdict, and the whole of it on both in-house backends."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.backends.torch import TorchBackend
from attnlib.cache.allocator import BlockAllocator
from attnlib.cli import main
from attnlib.cli.demo.result import compare
from attnlib.cli.demo.scheduler import Request, Scheduler
from attnlib.cli.demo.serve import Served
from attnlib.cli.demo.view import Progress
from attnlib.errors import CacheExhaustedError


def _scheduler(blocks: int = 16, size: int = 4, budget: int = 8, reqs: int = 8) -> Scheduler:
    return Scheduler(BlockAllocator(blocks, size), budget, reqs)


def _drive(scheduler: Scheduler, requests: list[Request]) -> list[list[tuple[int, int, int]]]:
    """Run to the end with a model that always says 7; returns (request, start, count) of each step."""
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
    assert steps[1] == [(0, 3, 1), (1, 5, 4)], "the decode stands first"
    assert steps[2:] == [[(0, 4, 1)], [(0, 5, 1)]]


def test_a_common_prefix_is_computed_once() -> None:
    first, second = Request(0, [1] * 8 + [5], 2), Request(1, [1] * 8 + [6], 2)
    steps = _drive(_scheduler(budget=9), [first, second])
    assert second.num_reused == 8
    assert (1, 8, 1) in [share for step in steps for share in step]


def test_the_youngest_gives_way_and_comes_back() -> None:
    scheduler = _scheduler(blocks=4, size=2, budget=16)
    old, young = Request(0, [1, 2, 3], 5), Request(1, [4, 5, 6], 5)
    _drive(scheduler, [old, young])
    assert scheduler.num_preemptions >= 1
    assert len(old.generated) == len(young.generated) == 5
    assert scheduler.allocator.num_used_blocks == 0


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(
        CacheExhaustedError, match="request 3 can grow to 5 blocks of 2 tokens, the cache has 4"
    ):
        _scheduler(blocks=4, size=2).add(Request(3, [1] * 8, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 1)), min_size=1, max_size=6
    ),
    st.integers(1, 9),
    st.integers(7, 12),
)
def test_every_token_is_computed_before_it_is_needed(
    requests: list, budget: int, blocks: int
) -> None:
    """Whatever the lengths, budget and pool: budgets hold, all requests end, all blocks come back."""
    scheduler = _scheduler(blocks=blocks, size=2, budget=budget, reqs=4)
    made = [
        Request(index, [token] * length, new) for index, (length, new, token) in enumerate(requests)
    ]
    for step in _drive(scheduler, made):
        assert sum(count for _, _, count in step) <= budget and len(step) <= 4
        assert len({index for index, _, _ in step}) == len(step)
        counts = [count for _, _, count in step]
        assert counts == sorted(counts, key=lambda count: count > 1) or 1 in counts
    assert all(len(request.generated) == request.max_new_tokens for request in made)
    assert scheduler.allocator.num_used_blocks == 0


def test_the_demo_on_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    assert main(["demo", "--tiny", "--device", "cpu", "--requests", "4"]) == 0
    shown = capsys.readouterr().out
    assert (
        "attnlib chose torch" in shown
        and "PASSED: 16/16 tokens equal to eager attention's" in shown
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
        result["verdict"]["passed"]
        and result["verdict"]["tokens"] == 60
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
        attnlib.unregister_backend("wrong")
    assert "FAILED" in capsys.readouterr().out


def _pair(theirs: list[list[float]], ours: list[list[float]]) -> list:
    """A request whose tokens our logits chose, with both logits."""
    rows = torch.tensor(ours)
    request = Request(0, [1], len(ours), generated=rows.argmax(-1).tolist())
    return [(request, torch.tensor(theirs), rows)]


def test_the_verdict_on_equal_tokens() -> None:
    verdict = compare(_pair([[0.0, 1.0, 2.0]], [[0.0, 1.0, 2.00002]]), torch.float32)
    assert (
        verdict.passed
        and verdict.equal == 1
        and verdict.largest_error == pytest.approx(1e-5, rel=0.1)
    )


def test_float32_excuses_no_token() -> None:
    """Even a tie that is broken the other way fails."""
    verdict = compare(_pair([[0.0, 2.0, 2.00001]], [[0.0, 2.00001, 2.0]]), torch.float32)
    assert verdict.largest_error <= verdict.budget and not verdict.passed
    assert "request 0, token 0: 1 where eager has 2, preferred by 1.0e-05" in str(verdict)


def test_bfloat16_excuses_what_eager_itself_hardly_prefers() -> None:
    """The gap is held against the stated budget (0.06 of the row's largest), not against the error that was measured: that would always do."""
    near, far = [[0.0, 1.9, 2.0]], [[0.0, 1.8, 2.0]]
    tie = compare(_pair(near, [[0.0, 2.0, 1.9]]), torch.bfloat16)
    assert (
        tie.passed
        and "0/1 tokens equal" in str(tie)
        and "; 1 differ where eager prefers its own by less than that" in str(tie)
    )
    verdict = compare(_pair(far, [[0.0, 1.91, 1.9]]), torch.bfloat16)
    assert verdict.largest_error <= verdict.budget and not verdict.passed and verdict.excused == 0


def test_logits_fail_even_where_tokens_are_equal() -> None:
    assert not compare(_pair([[0.0, 1.0, 2.0]], [[0.0, 1.5, 2.0]]), torch.bfloat16).passed
    assert not compare(_pair([[0.0, 1.0, 2.0]], [[0.0, float("-inf"), 2.0]]), torch.bfloat16).passed


def test_nan_and_nothing_are_no_success() -> None:
    """NaN is neither more nor less than a budget, and its argmax may be the right token."""
    nan = [
        (
            Request(0, [1], 1, generated=[2]),
            torch.tensor([[0.0, 1.0, 2.0]]),
            torch.tensor([[0.0, float("nan"), 2.0]]),
        )
    ]
    verdict = compare(nan, torch.float32)
    assert verdict.equal == 1 and verdict.largest_error == float("inf") and not verdict.passed
    assert not compare([], torch.float32).passed


def test_the_demo_in_bfloat16_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tiny", "--device", "cpu", "--dtype", "bfloat16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["budget"] == 6e-2


def test_the_demo_on_a_model_of_ones_own(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--model FOLDER`: a model with sinks and two kinds of layers, a table for each kind, and the folder's own tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.integrations.tiny_models import VOCABULARY, decoder

    decoder("gpt_oss").save_pretrained(tmp_path)
    letters = {
        "?": 0,
        **{letter: index + 1 for index, letter in enumerate("abcdefghijklmnopqrstuvwxyzHTWNLY.,!")},
    }
    assert len(letters) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)
    assert main(["demo", "--tiny", "--device", "cpu", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert (
        "sliding_attention\nattnlib chose torch" in shown
        and "full_attention\nattnlib chose torch" in shown
        and "PASSED: 12/12" in shown
    )


def test_progress_is_a_bar_on_a_terminal_and_a_few_lines_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(0, [1], 40)
    quiet = Progress([request])
    for count in range(1, 41):
        request.generated = [7] * count
        quiet(Served(steps=count))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1] == f"[{'#' * 30}] 40/40 tokens, step 40"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    request.generated = [7] * 20
    quiet(Served(steps=20))
    assert capsys.readouterr().out == f"\r[{'#' * 15}{'.' * 15}] 20/40 tokens, step 20"


def test_without_transformers_the_demo_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert 'pip install "attnlib[transformers]"' in capsys.readouterr().err


def test_the_demo_under_the_interpreter() -> None:
    """`ATTNLIB_BACKEND=triton attnlib demo --tiny` on a machine without a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "attnlib", "demo", "--tiny", "--device", "cpu", "--requests", "2"],
        capture_output=True,
        text=True,
        env={**environment, "ATTNLIB_BACKEND": "triton"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "TRITON_INTERPRET=1" in done.stderr
        and "tokens/s on triton" in done.stdout
        and "PASSED: 8/8" in done.stdout
    )


def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["demo", "--dtype", "float12"]) == 2
        and "--dtype float12 is no torch dtype" in capsys.readouterr().err
    )
    assert main(["demo", "--tiny", "--device", "cpu", "--num-blocks", "2"]) == 2
    assert "can grow to" in capsys.readouterr().err
    assert (
        main(["demo", "--device", "sm_90"]) == 2
        and "--device sm_90: no such device is here" in capsys.readouterr().err
    )
    assert (
        main(["demo", "--device", "cpu", "--model", "no/such/folder"]) == 2
        and "--model no/such/folder: transf" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(["demo", "--requests", "0"])
    assert "argument --requests: 0 is below 1" in capsys.readouterr().err


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
def test_what_auto_chooses_for_the_demo_on_a_gpu_passes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "bfloat16 on cuda" in shown and "auto; backend=" in shown and "PASSED" in shown
