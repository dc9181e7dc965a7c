"""One architecture: eager attention against attnlib in every way to run the model.

Outcomes of a case, and of an architecture (the first in `OUTCOMES` of its cases):

    correct       the outputs agree within the tolerance
    unaffected    the model computes its own attention: attnlib is never called
    refused       attnlib raised an error that names the cause
    wrong         the outputs differ
    crash         attnlib, or the model with attnlib, raised another error; eager attention did not
    skipped       there is nothing to compare: transformers does not run this case without attnlib
    not run       no tiny model, no inputs, or longer than the time limit

The tolerance follows from the model: eager attention runs a second time with weights that differ by
1e-6, and the difference that this makes is the noise of a correct result. A model whose noise is
too large for a comparison gets other weights. In a last run attnlib's results are disturbed by 2 %;
the comparison must find this, or the case shows nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, GenerationConfig

import attnlib.integrations.transformers as integration
from attnlib.errors import AttnlibError
from tests.integrations.transformers_sweep.inputs import Inputs, candidates, fill_images
from tests.integrations.transformers_sweep.tiny import build

__all__ = ["OUTCOMES", "Case", "installed", "run_architecture"]

OUTCOMES = ("wrong", "crash", "correct", "refused", "unaffected", "skipped", "not run")
"""In order of precedence: a model that is refused in one case and correct in others is correct."""

NEW_TOKENS = 10
_NOISE, _MARGIN, _FLOOR, _UNSTABLE, _DISTURBANCE = 1e-6, 50.0, 5e-5, 1e-2, 0.02
_AUTOCAST_FLOOR, _AUTOCAST_MARGIN, _AUTOCAST_DISTURBANCE = 5e-3, 3.0, 1.0
_SEEDS = (1, 2, 3)


@dataclass
class Case:
    """The result of one way to run a model.

    Attributes:
        outcome: one of `OUTCOMES`.
        reason: cause of every outcome but "correct".
        error, tolerance: relative to the largest value of the reference.
    """

    outcome: str
    reason: str = ""
    error: float = 0.0
    tolerance: float = 0.0


@dataclass
class _Probe:
    """What the registered attention function counts and does.

    Attributes:
        calls: calls of attnlib's attention function.
        disturbance: relative change of its results.
        errors: messages of attnlib's errors; `generate_batch` raises them in its own thread.
    """

    calls: int = 0
    disturbance: float = 0.0
    errors: list[str] = field(default_factory=list)


PROBE = _Probe()


@contextmanager
def installed() -> Iterator[None]:
    """Register attnlib with a counter around its attention function; its errors are recorded."""
    integration.register()
    attention = AttentionInterface._global_mapping[integration.NAME]
    create: Any = AttnlibError.__init__

    def counted(*args: Any, **kwargs: Any) -> Any:
        PROBE.calls += 1
        out, weights = attention(*args, **kwargs)
        if PROBE.disturbance:
            generator = torch.Generator().manual_seed(PROBE.calls)
            out = out * (1 + PROBE.disturbance * torch.randn(out.shape, generator=generator))
        return out, weights

    def recorded(self: AttnlibError, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        PROBE.errors.append(str(self))

    AttentionInterface.register(integration.NAME, counted)
    setattr(AttnlibError, "__init__", recorded)  # noqa: B010  # mypy refuses the assignment
    try:
        yield
    finally:
        setattr(AttnlibError, "__init__", create)  # noqa: B010
        integration.unregister()


def run_architecture(model_type: str, class_name: str, kind: str) -> dict[str, Any]:
    """All cases of one architecture.

    Returns:
        A record for `report`: outcome, reason, cases by name and a note about the inputs.
    """
    record: dict[str, Any] = {"model_type": model_type, "class": class_name, "kind": kind}
    try:
        model, inputs = _stable_model(model_type, class_name)
    except _NotBuilt as error:
        return {**record, "outcome": "not run", "reason": str(error), "cases": {}}
    cases = _cases(model, inputs, kind)
    outcome = min((case.outcome for case in cases.values()), key=OUTCOMES.index)
    reason = next((c.reason for c in cases.values() if c.outcome == outcome and c.reason), "")
    return {
        **record,
        "outcome": outcome,
        "reason": reason,
        "note": inputs.note,
        "images": inputs.images,
        "cases": {name: vars(case) for name, case in cases.items()},
    }


class _NotBuilt(Exception):
    """No tiny model, or no inputs that eager attention accepts."""


def _stable_model(model_type: str, class_name: str) -> tuple[Any, Inputs]:
    """A model whose eager outputs are finite and not chaotic, with inputs."""
    last = ""
    for seed in _SEEDS:
        try:
            model = build(model_type, class_name, seed)
        except Exception as error:
            raise _NotBuilt(f"no model: {_line(error)}") from error
        inputs = _accepted(model)
        if not _reaches_attnlib(model, inputs):
            return model, inputs
        noise = _noise(model, lambda m=model, i=inputs: _forward(m, i, "left")[0])
        if noise < _UNSTABLE:
            return model, inputs
        last = f"eager attention is unstable: weights that differ by 1e-6 change it by {noise:.1e}"
    raise _NotBuilt(last)


def _accepted(model: Any) -> Inputs:
    errors: list[str] = []
    for inputs in candidates(model):
        try:
            found = fill_images(model, inputs) if inputs.images < 0 else inputs
            sides = (None, "left") if found.rows and found.mask else (None,)
            if all(_finite(_forward(model, found, side)[0]) for side in sides):
                return found
            errors.append("eager attention returns NaN")
        except Exception as error:
            errors.append(_line(error))
    raise _NotBuilt(
        f"no inputs: {errors[-1] if errors else model.main_input_name} ({len(errors)} tried)"
    )


def _cases(model: Any, inputs: Inputs, kind: str) -> dict[str, Case]:
    if not _reaches_attnlib(model, inputs):
        return {"forward": Case("unaffected", "the model computes its own attention")}
    cases: dict[str, Case] = {}
    sides: dict[str, str | None] = {"forward": None}
    if inputs.rows and inputs.mask is not None:
        sides |= {"left padding": "left", "right padding": "right"}
    for name, side in sides.items():
        cases[name] = _compare(model, lambda side=side: _forward(model, inputs, side))
    if cases["forward"].outcome == "correct":
        with _disturbed():
            found = _compare(model, lambda: _forward(model, inputs, None))
        if found.outcome != "wrong":
            return {"forward": Case("skipped", "attention does not affect the output")}
    cases["autocast"] = _compare_autocast(model, inputs)
    if inputs.rows and _can_generate(model):
        cases["generate"] = _compare(model, lambda: _generate(model, inputs))
    if kind == "decoder" and inputs.images == 0 and _can_generate(model):
        cases["generate_batch"] = _compare_batch(model, inputs)
    return cases


def _reaches_attnlib(model: Any, inputs: Inputs) -> bool:
    """Whether a forward calls attnlib; also if it fails before it does."""
    PROBE.calls = 0
    try:
        _with(model, integration.NAME, lambda: _forward(model, inputs, None))
    except Exception:
        return True
    return PROBE.calls > 0


def _compare(model: Any, run: Callable[[], tuple[list[torch.Tensor], Any]]) -> Case:
    """Eager attention against attnlib."""
    try:
        expected, ids = _with(model, "eager", run)
    except Exception as error:
        return Case("skipped", f"eager: {_line(error)}")
    if not _finite(expected):
        return Case("skipped", "eager attention returns NaN")
    PROBE.calls = 0
    try:
        found, found_ids = _with(model, integration.NAME, run)
    except Exception as error:
        return _failed(error)
    if PROBE.calls == 0:
        return Case("unaffected", "the model computes its own attention")
    if ids is not None:  # greedy tokens: compare up to the first step with another token
        steps = (
            int((ids != found_ids).any(0).int().argmax()) + 1 if (ids != found_ids).any() else None
        )
        expected, found = expected[:steps], found[:steps]
    error, tolerance = _error(found, expected), _FLOOR
    if error > tolerance:
        tolerance = max(tolerance, _MARGIN * _noise(model, lambda: run()[0]))
    if error <= tolerance:
        return Case("correct", "", error, tolerance)
    if _equals_sdpa(model, run, found, tolerance):
        reason = f"equals sdpa, from which eager attention differs by {error:.1e}"
        return Case("correct", reason, error, tolerance)
    return Case("wrong", f"differs by {error:.1e}", error, tolerance)


def _compare_autocast(model: Any, inputs: Inputs) -> Case:
    """A forward under `torch.autocast` with bfloat16. Eager attention rounds differently, so that
    attnlib may be as far from the result without autocast as eager attention is, times a margin."""

    def run() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [x.float() for x in _forward(model, inputs, None)[0]]

    try:
        exact = [x.float() for x in _with(model, "eager", lambda: _forward(model, inputs, None))[0]]
        expected = _with(model, "eager", run)
    except Exception as error:
        return Case("skipped", f"eager: {_line(error)}")
    if not _finite(expected):
        return Case("skipped", "eager attention returns NaN")
    try:
        found = _with(model, integration.NAME, run)
        with _disturbed(_AUTOCAST_DISTURBANCE):
            disturbed = _with(model, integration.NAME, run)
    except Exception as error:
        return _failed(error)
    # Eager attention returns weights that attnlib returns on request only.
    exact, expected = exact[: len(found)], expected[: len(found)]
    tolerance = max(_AUTOCAST_FLOOR, _AUTOCAST_MARGIN * _error(expected, exact))
    error = _error(found, exact)
    if error > tolerance:
        return Case("wrong", f"differs by {error:.1e} under autocast", error, tolerance)
    if _error(disturbed, exact) <= tolerance:
        return Case("skipped", "rounding under autocast hides what attention adds")
    return Case("correct", "", error, tolerance)


def _equals_sdpa(
    model: Any, run: Callable[[], Any], found: list[torch.Tensor], tolerance: float
) -> bool:
    """Whether sdpa gives the same result: eager attention then has no unique answer.

    Outputs of some models depend on padding queries. Eager attention gives them the mean of all
    keys, sdpa and attnlib give 0.
    """
    try:
        expected, _ = _with(model, "sdpa", run)
    except Exception:  # the model does not support sdpa
        return False
    return _error(found, expected[: len(found)]) <= tolerance


def _failed(error: Exception) -> Case:
    if isinstance(error, AttnlibError) or str(error) in PROBE.errors:
        return Case("refused", _line(error).removeprefix("_BatchError: "))
    frames = traceback.extract_tb(error.__traceback__)
    own = any("/attnlib/integrations/" in frame.filename for frame in frames)
    last = frames[-1]
    where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
    return Case("crash", f"{'attnlib' if own else 'model'}: {_line(error)} ({where})")


def _with(model: Any, implementation: str, run: Callable[[], Any]) -> Any:
    model.set_attn_implementation(implementation)
    torch.manual_seed(0)
    with torch.no_grad():
        return run()


def _forward(model: Any, inputs: Inputs, side: str | None) -> tuple[list[torch.Tensor], None]:
    """The outputs at real tokens, and None."""
    batch, real = inputs.batch(side)
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(**batch)
    return [_real(tensor, real) for tensor in _tensors(output)], None


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The floating point tensors of an output, without caches."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output.detach().clone()
    elif isinstance(output, dict):
        for name, value in output.items():
            if name not in (
                "past_key_values",
                "cache_params",
                "loss",
                "attentions",
                "mems",
                "state",
            ):
                yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


def _real(tensor: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    if real is None or tensor.dim() < 2 or tensor.shape[:2] != real.shape:
        return tensor
    return tensor[real]


def _generate(model: Any, inputs: Inputs) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The logits of every greedy step, and the tokens `[B, steps]`."""
    batch, _ = inputs.batch("left")
    config = model.generation_config
    if model.config.is_encoder_decoder and config.decoder_start_token_id is None:
        config.decoder_start_token_id = 2
    torch.manual_seed(0)
    output = model.generate(
        **batch,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = list(output.logits)
    return logits, output.sequences[:, -len(logits) :]


def _can_generate(model: Any) -> bool:
    return bool(getattr(model, "can_generate", lambda: False)())


def _compare_batch(model: Any, inputs: Inputs) -> Case:
    """Continuous batching against eager attention, prompt by prompt."""
    try:
        expected = [_alone(model, row) for row in inputs.rows]
    except Exception as error:
        return Case("skipped", f"eager: {_line(error)}")
    PROBE.calls = 0
    try:
        found = _batched(model, inputs, integration.NAME)
    except Exception as error:
        case = _failed(error)
        reason = _unsupported(model, inputs)
        return case if reason is None else Case("skipped", f"transformers: {reason}")
    case = _same_tokens(found, expected)
    if case.outcome == "wrong":
        reason = _unsupported(model, inputs, expected)
        return case if reason is None else Case("skipped", f"transformers: {reason}")
    return case if PROBE.calls else Case("unaffected", "the model computes its own attention")


def _alone(model: Any, row: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of one prompt with eager attention, and the logits of its steps."""
    logits, tokens = _with(
        model,
        "eager",
        lambda: _generate(model, Inputs(rows=(row,))),
    )
    return tokens[0].tolist(), torch.cat(logits)


def _batched(model: Any, inputs: Inputs, implementation: str) -> list[list[int]]:
    from transformers import ContinuousBatchingConfig

    model.set_attn_implementation(implementation)
    page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    outputs = model.generate_batch(
        inputs=[list(row) for row in inputs.rows],
        generation_config=GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"num_blocks": 64, "max_batch_tokens": 24, page: 8}
        ),
        progress_bar=False,
    )
    errors = [output.error for output in outputs.values() if getattr(output, "error", None)]
    if errors or len(outputs) != len(inputs.rows):
        raise _BatchError(str(errors[0]) if errors else "no outputs")
    return [list(outputs[key].generated_tokens) for key in sorted(outputs, key=_index)]


class _BatchError(RuntimeError):
    """A request of continuous batching failed in the thread of transformers."""


def _index(key: str) -> int:
    return int("".join(filter(str.isdigit, key)))


def _same_tokens(found: list[list[int]], expected: list[tuple[list[int], torch.Tensor]]) -> Case:
    """Equal tokens; a token that eager attention likes equally well is equal."""
    worst = 0.0
    for tokens, (reference, logits) in zip(found, expected, strict=True):
        for step, (mine, theirs) in enumerate(zip(tokens, reference, strict=False)):
            if mine != theirs:
                row = logits[step]
                gap = float((row[theirs] - row[mine]) / row.abs().max())
                worst = max(worst, gap)
                break
    if worst > 1e-3:
        return Case("wrong", f"other tokens, {worst:.1e} below the best", worst, 1e-3)
    return Case("correct", "", worst, 1e-3)


def _unsupported(
    model: Any, inputs: Inputs, expected: list[tuple[list[int], torch.Tensor]] | None = None
) -> str | None:
    """Why transformers' own attention does not run this model in continuous batching either."""
    name = "sdpa" if model._supports_sdpa else "eager"
    try:
        found = _batched(model, inputs, name)
    except Exception as error:
        return f"{name} fails in continuous batching: {_line(error)}"
    if expected is not None and _same_tokens(found, expected).outcome == "wrong":
        return f"{name} generates other tokens in continuous batching than in generate"
    return None


def _noise(model: Any, run: Callable[[], list[torch.Tensor]]) -> float:
    """Relative change of eager outputs if the weights change by 1e-6."""
    expected = _with(model, "eager", run)
    with _nudged(model):
        found = _with(model, "eager", run)
    return _error(found, expected)


@contextmanager
def _nudged(model: Any) -> Iterator[None]:
    saved = [parameter.data for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            change = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data = parameter.data * (1 + _NOISE * change)
    try:
        yield
    finally:
        for parameter, data in zip(model.parameters(), saved, strict=True):
            parameter.data = data


@contextmanager
def _disturbed(share: float = _DISTURBANCE) -> Iterator[None]:
    PROBE.disturbance = share
    try:
        yield
    finally:
        PROBE.disturbance = 0.0


def _error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference relative to the largest value, over all outputs."""
    worst = 0.0
    if len(found) != len(expected):
        return float("inf")
    for mine, theirs in zip(found, expected, strict=True):
        if mine.shape != theirs.shape:
            return float("inf")
        finite = theirs.isfinite()
        if not torch.equal(finite, mine.isfinite()):
            return float("inf")
        if finite.any():
            scale = float(theirs[finite].abs().max()) or 1.0
            worst = max(worst, float((mine - theirs)[finite].abs().max()) / scale)
    return worst


def _finite(tensors: list[torch.Tensor]) -> bool:
    return bool(tensors) and not any(tensor.isnan().any() for tensor in tensors)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    name = "" if isinstance(error, (AttnlibError, _NotBuilt)) else f"{type(error).__name__}: "
    return (name + text)[:300]
