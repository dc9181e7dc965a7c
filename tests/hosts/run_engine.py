"""Run vLLM's engine on this CPU for several cases, one after the other, in one process.

    python tests/hosts/run_engine.py CASES.json RESULT.json

Started by `test_vllm_engine.py` with one release of vLLM on PYTHONPATH. A case has a `model` folder
and `arguments` of `vllm.LLM`, and `times` repeats each prompt in itself. With `span`, tokens at
these positions see each other, as those of an image; `from_tokens` leaves out shorter prompts.
`first_alone` serves the first prompt also before all of them. The result has the tokens (or
embeddings) of each prompt, or `error`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import drafts
import media_models
import selected_keys
from vllm_cpu_platform import inspect_models_here

for _name, _value in {
    "TEST_VLLM_CPU": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    from triton.runtime import interpreter

    from tests.triton_interpreter import speed_up_interpreter

    speed_up_interpreter(interpreter)
    _splat = interpreter.InterpreterBuilder.create_splat

    def _splat_masks(builder: Any, block: Any, scalar: Any) -> Any:
        """Triton 3.9 gives a comparison of scalars their type, so that its splat is no mask."""
        if scalar.data.dtype == np.bool_:
            scalar = interpreter.TensorHandle(scalar.data, interpreter.tl.int1)
        return _splat(builder, block, scalar)

    interpreter.InterpreterBuilder.create_splat = _splat_masks

ARGUMENTS: dict[str, Any] = dict(
    skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=512,
    max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=8 << 20,
    distributed_executor_backend="uni", disable_log_stats=True,
)  # fmt: skip


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The result of one case."""
    from vllm import LLM, SamplingParams

    from attnlib.integrations.vllm.names import backend_name

    expected = json.loads((Path(case["model"]) / "expected.json").read_text())
    arguments = {
        **ARGUMENTS, "attention_backend": backend_name(), "model": case["model"],
        **case.get("arguments", {}),
    }  # fmt: skip
    if "span" in case:
        give_spans(case["span"])
    watched = drafts.watch() if case.get("drafts") else None
    llm = LLM(**arguments)
    times = case.get("times", 1)
    if "media" in expected:
        given = media_models.given(Path(case["model"]).name)
    else:
        rows = expected["span_prompts" if "span" in case else "prompts"][: case.get("prompts")]
        rows = [row for row in rows if len(row) >= case.get("from_tokens", 0)]
        given = [{"prompt_token_ids": row * times} for row in rows]
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    impls = (getattr(layer, "impl", None) for layer in layers.values())  # an indexer has none
    ours = (getattr(impl, "_attention", None) for impl in impls)
    result: dict[str, Any] = {
        "backends": sorted({layer.backend.get_name() for layer in ours if layer is not None}),
        "drafts": watched,
    }
    if case.get("pooling"):
        outputs = llm.encode(given, pooling_task="embed", use_tqdm=False)
        result["states"] = [output.outputs.data.tolist() for output in outputs]
    else:
        sampling = SamplingParams(
            temperature=0, max_tokens=case.get("new_tokens", 24), ignore_eos=True,
            detokenize=False, logprobs=2 if case.get("leads") else None,
        )  # fmt: skip
        if case.get("first_alone"):
            llm.generate(given[:1], sampling, use_tqdm=False)
        for _ in range(case.get("repeat", 1)):
            outputs = llm.generate(given, sampling, use_tqdm=False)
        result["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        if case.get("leads"):
            result["leads"] = [leads(output.outputs[0].logprobs) for output in outputs]
        result["blocks"] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        result["cached_tokens"] = [output.num_cached_tokens for output in outputs]
        if not arguments["disable_log_stats"]:
            counts = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
            result["accepted"] = counts.get("vllm:spec_decode_num_accepted_tokens")
            result["drafted"] = counts.get("vllm:spec_decode_num_draft_tokens")
            result["preemptions"] = counts["vllm:num_preemptions"]
        if arguments["distributed_executor_backend"] == "uni":
            core = llm.llm_engine.engine_core.engine_core
            result["batches_in_flight"] = core.batch_queue_size
            worker = core.model_executor.driver_worker.worker
            result["runner"] = type(worker.model_runner).__module__
            config = getattr(worker.model_runner, "kv_cache_config", None)
            result["cache_groups"] = len(config.kv_cache_groups) if config else None
    if "kv_transfer_config" in arguments:  # a process has one connector
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        ensure_kv_transfer_shutdown()
    return result


def give_spans(span: list[int]) -> None:
    """Let the first model runner say that every request has an image at these positions (0.33)."""
    from vllm.config import ModelConfig
    from vllm.v1.worker import gpu_model_runner as runner

    ModelConfig.is_mm_prefix_lm = property(lambda config: True)
    runner.compute_mm_prefix_ranges = lambda requests, *_, **__: {
        number: [tuple(span)] for number in range(len(requests))
    }


def leads(logprobs: Any) -> list[float]:
    """How far the log-probability of each chosen token leads that of the next one."""
    found = []
    for row in logprobs:
        first, second = sorted((entry.logprob for entry in row.values()), reverse=True)[:2]
        found.append(first - second)
    return found


def main(cases: Path, results: Path) -> None:
    """Run all cases; an exception is the result of its case."""
    inspect_models_here()
    selected_keys.select_by_positions()
    found = {}
    for name, case in json.loads(cases.read_text()).items():
        start = time.perf_counter()
        try:
            with mock.patch.dict(os.environ, case.get("environment", {})):
                found[name] = run(case)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        gc.collect()
        results.write_text(json.dumps(found))
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)  # vLLM 0.33 fails to clean up where there is no accelerator


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
