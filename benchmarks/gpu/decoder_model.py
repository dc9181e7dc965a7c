"""A decoder with the shape of Llama 3 8B and random weights: generation, and comparison of two
runs.

With random weights, the two largest of 128256 logits often differ by less than the rounding of
bfloat16, so the tokens of two correct implementations differ sooner or later. The comparison
therefore examines the first difference of each prompt. Both implementations compute the logits of
that step from the same tokens. The margin of the reference between the two tokens is compared with
the error of the logits, and the error with the distance of sdpa from eager.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "Generated",
    "generate",
    "compare",
    "make_config",
    "make_model",
    "make_prompts",
    "served_by",
    "split_name",
]

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
NOISE_FACTOR = 4.0
"""An error of the logits up to this multiple of the distance of sdpa from eager is rounding."""


@dataclass(frozen=True)
class Generated:
    """The result of one `generate_batch`.

    Attributes:
        tokens: the tokens of each prompt.
        seconds: time from the arrival of the first request to the last token.
        step_ms: median time between two tokens of a request, in milliseconds.
        graphs: use of CUDA graphs as transformers reports it, "(varlen, decode)".
    """

    tokens: list[list[int]]
    seconds: float
    step_ms: float
    graphs: str

    @property
    def tokens_per_second(self) -> float:
        """Number of generated tokens divided by `seconds`."""
        return sum(map(len, self.tokens)) / max(self.seconds, 1e-9)


def split_name(name: str) -> tuple[str, bool]:
    """(name without suffix, False if the suffix is @nographs, which forbids CUDA graphs)."""
    plain, _, suffix = name.partition("@")
    if suffix not in ("", "nographs"):
        raise ValueError(f"{name}: the only suffix is @nographs")
    return plain, not suffix


def make_config(layers: int, **changes: Any) -> Any:
    """The config of a Llama 3 8B with `layers` layers and changed fields."""
    from transformers import LlamaConfig

    sizes = {
        **LLAMA_3_8B,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "num_hidden_layers": layers,
        **changes,
    }
    return LlamaConfig(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0)


def make_model(config: Any, device: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """The model with seeded weights, initialized on its device.

    Matrices preserve the scale of their input. Query and key projections have larger weights, so
    that few keys get most of the attention and one wrong key changes the result.
    """
    from transformers import LlamaForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.data.fill_(1.0)
            continue
        width = 1.0 if "embed_tokens" in name else parameter.shape[1] ** -0.5
        wider = 1.6 if "q_proj" in name or "k_proj" in name else 1.0
        parameter.data.normal_(0.0, width * wider, generator=generator)
    return model.eval().requires_grad_(False)


def make_prompts(
    count: int, vocabulary: int, shortest: int, longest: int, seed: int = 0
) -> list[list[int]]:
    """Random prompts of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [
        torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]


class _LogCollector(logging.Handler):
    """Collects the log of the batching thread of transformers, which does not raise its errors."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.errors: list[str] = []
        self.graphs = "unknown"

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.ERROR:
            trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
            self.errors.append(f"{message}\n{trace}")
        elif "cuda graphs for (varlen, decode) paths" in message:
            self.graphs = message.rpartition("paths:")[2].strip()


def generate(
    model: Any,
    implementation: str,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    graphs: bool = True,
    **settings: Any,
) -> Generated:
    """Run `generate_batch` once, on the paged cache of transformers.

    Args:
        model: from `make_model`.
        implementation: "attnlib" (with the backend of ATTNLIB_BACKEND), "sdpa" or "eager".
        prompts: token ids.
        max_new_tokens: tokens to generate for each.
        graphs: False forbids CUDA graphs; with True, transformers decides.
        settings: fields of `ContinuousBatchingConfig`.

    Raises:
        RuntimeError: a prompt was not finished; the message contains the errors of the batching
            thread.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    page = settings.pop("page_size", 256)
    settings[
        "page_size"
        if "page_size" in ContinuousBatchingConfig.__dataclass_fields__
        else "block_size"
    ] = page
    if not graphs:
        settings["use_cuda_graph"] = False
    model.set_attn_implementation(implementation)
    collector, logger = _LogCollector(), logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        outputs = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(
                max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
            record_timestamps=True,
            progress_bar=False,
        )
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
    failures = [str(output.error) for output in outputs.values() if output.error]
    if failures or len(outputs) != len(prompts):
        error = (failures or collector.errors or ["no error was logged"])[0].strip()
        raise RuntimeError(
            f"{len(failures)} of {len(prompts)} prompts failed, {len(prompts) - len(outputs)} have "
            "no "
            f"output: {error.splitlines()[-1]}\n{error[-2500:]}"
        )
    return _generated(list(outputs.values()), collector.graphs)


def _generated(outputs: list[Any], graphs: str) -> Generated:
    outputs = sorted(outputs, key=lambda output: int(str(output.request_id).rpartition("_")[2]))
    times = [output.timestamps for output in outputs]
    intervals = [
        after - before for row in times for before, after in zip(row, row[1:], strict=False)
    ]
    seconds = max(row[-1] for row in times) - min(output.created_time for output in outputs)
    return Generated(
        [list(output.generated_tokens) for output in outputs],
        seconds,
        1e3 * statistics.median(intervals or [0.0]),
        graphs,
    )


def served_by(model: Any) -> list[str]:
    """Names of the attnlib backends that the layers of the model used."""
    from attnlib.integrations.transformers import layers

    known = (layers._layers.get(module, {}) for module in model.modules())
    return sorted(
        {entry.layer.backend.get_name() for entries in known for entry in entries.values()}
    )


def compare(
    model: Any,
    implementation: str,
    prompts: list[list[int]],
    tokens: list[list[int]],
    expected: list[list[int]],
) -> list[dict[str, Any]]:
    """Examine the first difference of each prompt.

    Returns:
        One dict for each prompt that differs. `margin` is the margin by which the reference (sdpa)
        prefers its token, `top2` the margin between its best two tokens, `error` the largest
        difference of the logits from the reference, `noise` that of eager from sdpa. `explained` is
        True if the margin is at most twice the error or noise, and the error at most `NOISE_FACTOR`
        times the noise.
    """
    found = []
    for index, (prompt, mine, theirs) in enumerate(zip(prompts, tokens, expected, strict=True)):
        step = first_difference(mine, theirs)
        if step is None:
            continue
        if step >= min(len(mine), len(theirs)):
            found.append(
                {
                    "prompt": index,
                    "step": step,
                    "explained": False,
                    "lengths": [len(mine), len(theirs)],
                }
            )
            continue
        found.append(
            {
                "prompt": index,
                "step": step,
                **_compare_logits(
                    model, implementation, prompt + theirs[:step], mine[step], theirs[step]
                ),
            }
        )
    return found


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position where two sequences differ, their length included.

    None if they are equal.
    """
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return step
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _compare_logits(
    model: Any, implementation: str, prefix: list[int], mine: int, theirs: int
) -> dict[str, Any]:
    reference, eager = _logits(model, "sdpa", prefix), _logits(model, "eager", prefix)
    own = eager if implementation == "eager" else _logits(model, implementation, prefix)
    best = torch.topk(reference, 2).values
    error, noise = float((own - reference).abs().max()), float((eager - reference).abs().max())
    margin = float(reference[theirs] - reference[mine])
    scale = float(reference.std())
    explained = margin <= 2 * max(error, noise) and error <= NOISE_FACTOR * noise
    return {
        "ours": mine,
        "theirs": theirs,
        "margin": margin,
        "top2": float(best[0] - best[1]),
        "error": error,
        "noise": noise,
        "logit_std": scale,
        "explained": explained,
    }


@torch.no_grad()
def _logits(model: Any, implementation: str, prefix: list[int]) -> torch.Tensor:
    """Float32 logits of the token after a prefix, by one forward without a cache."""
    model.set_attn_implementation(implementation)
    ids = torch.tensor([prefix], device=next(model.parameters()).device)
    logits: torch.Tensor = (
        model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    )
    return logits
