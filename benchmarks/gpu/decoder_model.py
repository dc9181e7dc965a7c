"""A Llama-3-8B-shaped decoder with random weights, how it generates, and how two of its runs are compared.

Random weights make an honest but hard comparison: the best two of 128256 logits often lie within the rounding of bfloat16, so that two right
implementations part ways sooner or later. A first difference is therefore looked at: both implementations compute the logits of that very step from
the same tokens, and the distance between the two tokens under the reference is held against the error and against what the reference's own two
implementations (sdpa and eager) differ by.
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
    "judge",
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
"""An error of the logits up to this many times the distance of sdpa from eager is rounding."""


@dataclass(frozen=True)
class Generated:
    """What one `generate_batch` gave.

    Attributes:
        tokens: of each prompt.
        seconds: from the first request's arrival to the last token.
        step_ms: median time between two tokens of a request.
        graphs: what transformers said of CUDA graphs, "(varlen, decode)".
    """

    tokens: list[list[int]]
    seconds: float
    step_ms: float
    graphs: str

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all prompts over `seconds`."""
        return sum(map(len, self.tokens)) / max(self.seconds, 1e-9)


def split_name(name: str) -> tuple[str, bool]:
    """(name without its suffix, whether CUDA graphs are left to transformers): `triton@nographs` forbids them."""
    plain, _, suffix = name.partition("@")
    if suffix not in ("", "nographs"):
        raise ValueError(f"{name}: the only suffix is @nographs")
    return plain, not suffix


def make_config(layers: int, **changes: Any) -> Any:
    """The config of a decoder of Llama-3-8B's shape with this many layers."""
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
    """The model with seeded weights, made where they stay.

    Every matrix keeps the size of what it multiplies; queries and keys are drawn wider, so that a few keys hold most of the attention and a wrong
    one among them tells.
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


class _Listener(logging.Handler):
    """Keeps what transformers' batching thread says: its errors go nowhere else."""

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
    """One `generate_batch` over transformers' paged cache.

    Args:
        model: from `make_model`.
        implementation: transformers' attention, "attnlib" (its backend comes from ATTNLIB_BACKEND), "sdpa" or "eager".
        prompts: token ids.
        max_new_tokens: tokens to generate for each.
        graphs: False forbids CUDA graphs; True leaves them to transformers.
        settings: for `ContinuousBatchingConfig`; the name of the page size is found out.

    Raises:
        RuntimeError: not every prompt was finished; with what the batching thread said.
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
    listener, logger = _Listener(), logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.addHandler(listener)
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
        logger.removeHandler(listener)
        logger.setLevel(level)
    failures = [str(output.error) for output in outputs.values() if output.error]
    if failures or len(outputs) != len(prompts):
        told = (failures or listener.errors or ["nothing was said"])[0].strip()
        reason = told.splitlines()[-1]
        raise RuntimeError(
            f"{len(failures)} of {len(prompts)} prompts failed, {len(prompts) - len(outputs)} are missing: {reason}\n{told[-2500:]}"
        )
    return _generated(list(outputs.values()), listener.graphs)


def _generated(outputs: list[Any], graphs: str) -> Generated:
    outputs = sorted(outputs, key=lambda output: int(str(output.request_id).rpartition("_")[2]))
    times = [output.timestamps for output in outputs]
    gaps = [after - before for row in times for before, after in zip(row, row[1:], strict=False)]
    seconds = max(row[-1] for row in times) - min(output.created_time for output in outputs)
    return Generated(
        [list(output.generated_tokens) for output in outputs],
        seconds,
        1e3 * statistics.median(gaps or [0.0]),
        graphs,
    )


def served_by(model: Any) -> list[str]:
    """Names of the attnlib backends that the model's layers have run on."""
    from attnlib.integrations.transformers import layers

    known = (layers._layers.get(module, {}) for module in model.modules())
    return sorted(
        {entry.layer.backend.get_name() for entries in known for entry in entries.values()}
    )


def judge(
    model: Any,
    implementation: str,
    prompts: list[list[int]],
    ours: list[list[int]],
    expected: list[list[int]],
) -> list[dict[str, Any]]:
    """What lies behind the first difference of each prompt: one dict for each prompt that differs, none for the others.

    `gap` is how much the reference prefers its own token to ours, `top2` its distance between its best two, `error` the largest difference of our
    logits from the reference's (sdpa) over the vocabulary, `noise` that of eager from sdpa. `explained` is True where the gap is no wider than two
    errors can make it, and the error no larger than `NOISE_FACTOR` times the noise.
    """
    found = []
    for index, (prompt, mine, theirs) in enumerate(zip(prompts, ours, expected, strict=True)):
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
                **_judged(model, implementation, prompt + theirs[:step], mine[step], theirs[step]),
            }
        )
    return found


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two sequences differ, a missing end included; None when they are equal."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return step
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _judged(
    model: Any, implementation: str, prefix: list[int], mine: int, theirs: int
) -> dict[str, Any]:
    reference, eager = _logits(model, "sdpa", prefix), _logits(model, "eager", prefix)
    own = eager if implementation == "eager" else _logits(model, implementation, prefix)
    best = torch.topk(reference, 2).values
    error, noise = float((own - reference).abs().max()), float((eager - reference).abs().max())
    gap = float(reference[theirs] - reference[mine])
    scale = float(reference.std())
    explained = gap <= 2 * max(error, noise) and error <= NOISE_FACTOR * noise
    return {"ours": mine, "theirs": theirs, "gap": gap, "top2": float(best[0] - best[1]), "error": error, "noise": noise, "logit_std": scale,
            "explained": explained}  # fmt: skip


@torch.no_grad()
def _logits(model: Any, implementation: str, prefix: list[int]) -> torch.Tensor:
    """Float32 logits of the token after a prefix, by an ordinary forward."""
    model.set_attn_implementation(implementation)
    ids = torch.tensor([prefix], device=next(model.parameters()).device)
    logits: torch.Tensor = (
        model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    )
    return logits
