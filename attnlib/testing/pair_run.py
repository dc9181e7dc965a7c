"""Run one call of a pair of backends: the writer writes the cache, the reader attends to it."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.errors import ContractError
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.captured_step import CapturedStep
from attnlib.testing.check import without_validation
from attnlib.testing.checks.cache_write import compare_storage
from attnlib.testing.first_difference import first_difference, sees_no_key
from attnlib.testing.outcome import Outcome, UnsupportedCase
from attnlib.testing.pair_cases import PairCase, pair_cases
from attnlib.testing.runner import AttentionOutput, attend, expected_results, make_impl
from attnlib.testing.score_rounding import rounding_limits

__all__ = ["Pair", "ParityCell"]

Backend = type[AttentionBackend]


@dataclass(frozen=True)
class ParityCell:
    """The result of one ordered pair in one call.

    Attributes:
        writer, reader: names of the backends.
        case: name of the call.
        rule: the rule that a difference in this call violates.
        outcome: pass, fail or unsupported.
        message: the error or the reasons; "" for a pass.
        difference: largest absolute difference to the result of the writer reading its own cache;
            NaN if there is no result.
        reproduce: the command that runs only this cell.
    """

    writer: str
    reader: str
    case: str
    rule: str
    outcome: Outcome
    message: str
    difference: float
    reproduce: str = ""


@dataclass(frozen=True)
class Pair:
    """An ordered pair of backends.

    Attributes:
        writer, reader: the backends.
        device: the device to run on.
        seed: seed of all random numbers.
        labels: the backends as the caller named them, for reproduction lines.
    """

    writer: Backend
    reader: Backend
    device: torch.device
    seed: int = 0
    labels: tuple[str, str] = ("", "")

    @property
    def id(self) -> str:
        """WRITER-to-READER."""
        return f"{self.writer.get_name()}-to-{self.reader.get_name()}"

    def cases(self, only: str | None = None) -> list[PairCase | ContractError]:
        """The selected calls; an error if the two support none of the common cases together.

        Args:
            only: comma-separated names of calls, with * and ?; None selects all.
        """
        target = BackendUnderTest(
            self.writer, self.labels[0], self.device, self.seed, partner=self.reader
        )
        try:
            found = list(pair_cases(target))
        except ContractError as error:
            return [error]
        patterns = [part.strip() for part in only.split(",")] if only else ["*"]
        return [case for case in found if any(fnmatch.fnmatchcase(case.name, p) for p in patterns)]

    def run(self, case: PairCase | ContractError) -> ParityCell:
        """Run one of `cases`."""
        if isinstance(case, ContractError):
            return self._cell("all", "", Outcome.UNSUPPORTED, str(case))
        try:
            with without_validation():
                if self.writer is self.reader:
                    result = _own_result(self.writer, case, self.device, self.seed)
                else:
                    result = _exchange(self.writer, self.reader, case, self.device, self.seed)
                message, difference = self._judge(case, *result)
        except UnsupportedCase as refusal:
            return self._cell(case.name, case.rule, Outcome.UNSUPPORTED, str(refusal))
        except Exception as error:
            message = f"raised {type(error).__name__}: {error} | case: {case.case}"
            return self._cell(case.name, case.rule, Outcome.FAIL, message)
        outcome = Outcome.FAIL if message else Outcome.PASS
        return self._cell(case.name, case.rule, outcome, message, difference)

    def _judge(self, case: PairCase, actual: AttentionOutput, written: str) -> tuple[str, float]:
        """The errors of a result, and its difference to the writer's on its own cache."""
        errors, others = [written] if written else [], {}
        difference = torch.zeros(1)
        if self.writer is not self.reader:
            try:
                own = _own_result(self.writer, case, self.device, self.seed)[0]
            except Exception:
                difference += torch.nan  # the failure of the writer's own cell
            else:
                others = {self.writer.get_name(): own}
                difference = (actual.out.double() - own.out.double()).abs()
        errors += _differences(case, actual, others, self.device)
        message = f"{'; '.join(errors)} | case: {case.case}" if errors else ""
        return message, float(difference.max()) if difference.numel() else 0.0

    def _cell(
        self,
        case: str,
        rule: str,
        outcome: Outcome,
        message: str,
        difference: float = float("nan"),
    ) -> ParityCell:
        names = dict.fromkeys(self.labels)
        device = "" if self.device.type == "cuda" else f" --device {self.device}"
        reproduce = f"attnlib parity {' '.join(names)} --only {case} --seed {self.seed}{device}"
        writer, reader = self.writer.get_name(), self.reader.get_name()
        return ParityCell(writer, reader, case, rule, outcome, message, difference, reproduce)


def _exchange(
    writer: Backend, reader: Backend, pair_case: PairCase, device: torch.device, seed: int
) -> tuple[AttentionOutput, str]:
    """Write with one backend and attend with another.

    Returns:
        The result, and what is wrong with the written cache ("" for nothing).

    Raises:
        UnsupportedCase: one of the two does not support the case; each reason starts with the
            backend's name.
    """
    case = pair_case.case
    for backend in dict.fromkeys((writer, reader)):
        if reasons := backend.validate_configuration(case.spec, device):
            raise UnsupportedCase([f"{backend.get_name()}: {reason}" for reason in reasons])
    step = case.materialize(device, kv_written=False)
    if pair_case.captured_query_len:
        target = BackendUnderTest(reader, reader.get_name(), device, seed)
        captured = CapturedStep(
            target,
            case,
            pair_case.captured_query_len,
            step.inputs.placement.num_blocks,
            writer=writer,
        )
        captured.load(step)
        captured.replay()
        return AttentionOutput(captured.out, None), ""
    make_impl(writer, step).write_kv(
        step.inputs.key, step.inputs.value, step.cache(), step.inputs.slot_mapping
    )
    damage = compare_storage(step, case.materialize(device))
    rule = "M9" if case.spec.is_kv_quantized else "P4"
    written = f"{rule}: the cache of {writer.get_name()}: {damage}" if damage else ""
    metadata = reader.make_builder(case.spec, device).build(0, step.common())
    return attend(make_impl(reader, step), step, metadata), written


@lru_cache(maxsize=4)  # the readers of one writer follow each other
def _own_result(
    writer: Backend, case: PairCase, device: torch.device, seed: int
) -> tuple[AttentionOutput, str]:
    """`_exchange` of a backend with itself."""
    return _exchange(writer, writer, case, device, seed)


def _differences(
    pair_case: PairCase,
    actual: AttentionOutput,
    others: dict[str, AttentionOutput],
    device: torch.device,
) -> list[str]:
    """The errors of a result: the rule, the first differing row, and the limits."""
    case, batch = pair_case.case, pair_case.case.batch_spec
    expected, same_precision = expected_results(case, str(device))
    count, errors = batch.num_actual_tokens, []
    rows = slice(0, count)
    for name in ("out", "lse") if actual.lse is not None else ("out",):
        found, right = getattr(actual, name)[rows], getattr(expected, name)[rows]
        limits = rounding_limits(expected, name, case.torch_dtype, device)
        result = compare(
            found,
            right,
            getattr(same_precision, name)[rows],
            case.torch_dtype,
            name,
            None if limits is None else limits[rows],
        )
        if result.passed:
            continue
        if found.shape != right.shape:
            errors.append(f"{pair_case.rule}: {result}")
            continue
        compared = {
            f"{other} reading it": getattr(result_of, name)[rows]
            for other, result_of in others.items()
        }
        row, where = first_difference(result, batch, found, right, compared)
        rule = "M5: rows without keys" if sees_no_key(batch, row) else pair_case.rule
        errors.append(f"{rule}: {where} | {result}")
    padding = actual.out[count:].flatten(1).any(dim=1).nonzero()
    if len(padding):
        errors.append(f"M6: padding row {count + int(padding[0])} must be exactly 0")
    return errors
